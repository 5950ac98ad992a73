"""Bookkeeping of the KV blocks of one worker: references, prefix cache, contiguous allocation.

A block is in exactly one of three states:

    empty       in a free segment; has no hash
    referenced  held by one sequence or several; has a hash once it was sealed
    evictable   held by nobody, has a hash, and can be matched until its room is needed

The pool owns ids only, never bytes. It runs on one thread and never waits. Callers must not await
between `match` and `acquire`, since a block that was only matched may be evicted.

Tiers below the pool may hold copies of blocks (`kv/tiers.py`). The worker publishes that a block
is gone when neither the pool nor a tier has it. A block may be evicted while it is copied to a
tier, so no eviction ever waits: the copier asks `is_same` afterwards.
Tests: tests/unit/kv/test_block_pool.py, tests/property/test_block_pool_machine.py, test_tiers.py.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from kvmesh.core.errors import OutOfBlocksError
from kvmesh.core.kv_groups import PLAIN, KvGroups
from kvmesh.core.types import BlockHash
from kvmesh.kv.block_news import BlockEvents, BlockNews, is_announced
from kvmesh.kv.free_segments import FreeSegments
from kvmesh.kv.lower_copies import LowerCopies, UnsavedBlock, with_tiers
from kvmesh.kv.runs import consecutive_runs

CONTIGUITY_SHARE = 1 / 8
"""Fraction of the pool that may stand empty to get contiguous runs; cached blocks are evicted."""

MAX_MOVED = 4096
"""Maximum number of moved blocks before the record of runs is updated; bounds one call's cost."""


@dataclass(frozen=True, slots=True)
class BlockPoolStatistics:
    """Counts of blocks now, and totals since the start.

    Attributes:
        num_empty, num_evictable, num_referenced: add up to num_blocks.
        num_hashed: blocks that `match` can find.
        num_free_segments, largest_free_segment: fragmentation of the empty blocks.
    """

    num_blocks: int
    num_empty: int
    num_evictable: int
    num_referenced: int
    num_hashed: int
    num_free_segments: int
    largest_free_segment: int
    allocated_total: int
    evicted_total: int


class BlockPool:
    """Block ids 0..num_blocks-1 with reference counts and a prefix cache by block hash.

    Args:
        groups: the model's KV groups, so that others learn where a prefix can be resumed.
    """

    def __init__(self, num_blocks: int, block_size: int, groups: KvGroups = PLAIN) -> None:
        assert num_blocks > 0, f"{num_blocks} blocks"
        assert block_size > 0, f"block size {block_size}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._empty = FreeSegments()
        self._empty.add(range(num_blocks))
        # Empty and evictable blocks together: runs that become free by evicting the blocks in them.
        # Few allocations ask for these runs, so the record is updated only when one does.
        self._unreferenced = FreeSegments()
        self._unreferenced.add(range(num_blocks))
        self._was_unreferenced = bytearray(b"\x01" * num_blocks)
        self._moved: set[int] = set()
        self._references = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        # The next block to evict comes first. A sequence's blocks enter tail first, so a parent
        # outlives its children and the remaining cached blocks still match from the root.
        # An OrderedDict: deleting from a plain dict's front makes the next look at it slow.
        # The value is the turn in which the block was released.
        self._evictable: OrderedDict[int, int] = OrderedDict()
        self._turn = 0
        self._news = BlockNews(groups, block_size)
        self._allocated_total = 0
        self._evicted_total = 0
        # Evictions of each block id: a reader that sees another count has read another block's KV.
        self._lives = [0] * num_blocks
        # Blocks without a copy in the tiers below: evictable ones, oldest first as a rule, and full
        # ones that have been in use since they were sealed.
        self._unsaved: dict[int, None] = {}
        self._unsaved_in_use: dict[int, None] = {}
        self._below: LowerCopies | None = None
        self.on_unsaved: Callable[[], None] | None = None
        """Called when blocks without a copy below were sealed or became evictable."""
        self.on_removed: Callable[[BlockHash], None] | None = None
        """Called with each hash that can no longer be matched or brought up."""
        self.on_lowered: Callable[[BlockHash], None] | None = None
        """Called with each hash whose block is now in a lower tier and not in the pool."""
        self.on_free: Callable[[], None] | None = None
        """Called when `allocate` can give more blocks than before."""

    @property
    def below(self) -> LowerCopies | None:
        """The tiers below; set before any block is taken."""
        return self._below

    @below.setter
    def below(self, below: LowerCopies) -> None:
        self._below = below
        self._news.tells_tiers(with_tiers(below, below.keys()))

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can give: empty ones and evictable ones."""
        return self._empty.num_blocks + len(self._evictable)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence holds a block."""
        return self.num_free == self.num_blocks

    def allocate(self, n: int, after: int | None = None) -> list[int]:
        """Takes `n` blocks in few contiguous runs, each with one reference.

        Args:
            after: last block of the sequence so far; the new blocks follow it if there is room.

        Raises:
            OutOfBlocksError: fewer than `n` blocks are free; nothing has changed.
        """
        assert n >= 0, f"{n} blocks"
        if n > self.num_free:
            raise OutOfBlocksError(
                f"{n} blocks wanted, {self.num_free} of {self.num_blocks} are free"
            )
        if n > self._empty.num_blocks:
            self._evict(n - self._empty.num_blocks)
        self._make_contiguous(n)
        blocks = self._empty.take(n, after)
        for block in blocks:
            self._references[block] = 1
        self._move(blocks)
        self._allocated_total += n
        return blocks

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Returns the blocks of the longest cached prefix of `hashes`; takes no references."""
        blocks: list[int] = []
        find = self._block_of.get
        for block_hash in hashes:
            block = find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, block_hash: BlockHash) -> int | None:
        """Returns the block that has this hash, or None; takes no reference."""
        return self._block_of.get(block_hash)

    def acquire(self, blocks: Sequence[int]) -> None:
        """Takes one reference on each block; every one is referenced or evictable."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._evictable, f"block {block} is empty"
                del self._evictable[block]
                self._unsaved.pop(block, None)
            self._references[block] += 1
        self._move(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Gives back one reference on each block.

        Args:
            blocks: in the order of the sequence. Of the blocks that become evictable, later ones
                are evicted first.
        """
        emptied: list[int] = []
        references, hash_of, below = self._references, self._hash_of, self._below
        before, num_unsaved = self.num_free, len(self._unsaved)
        self._turn += 1
        for block in reversed(blocks):
            left = references[block] - 1
            assert left >= 0, f"block {block} is not referenced"
            references[block] = left
            if left:
                continue
            key = hash_of[block]
            if key is None:
                emptied.append(block)
                continue
            self._unsaved_in_use.pop(block, None)
            self._evictable[block] = self._turn
            if below is not None and key not in below:
                self._unsaved[block] = None
        if emptied:
            self._empty.add(emptied)
        self._move(blocks)
        if self.on_free is not None and self.num_free > before:
            self.on_free()
        if self.on_unsaved is not None and len(self._unsaved) > num_unsaved:
            self.on_unsaved()

    @contextlib.contextmanager
    def held(self, blocks: Sequence[int]) -> Iterator[None]:
        """Keeps blocks as they are inside the context, even if their sequence releases them."""
        self.acquire(blocks)
        try:
            yield
        finally:
            self.release(blocks)

    def seal(self, block: int, block_hash: BlockHash) -> bool:
        """Makes a full block findable by its hash.

        The caller holds a reference on the block and no longer writes to it.

        Returns:
            False if another block has this hash already; then this block gets no hash.
        """
        assert self._references[block] > 0, f"block {block} is not referenced"
        holder = self._block_of.setdefault(block_hash, block)
        if holder != block:
            return False
        assert self._hash_of[block] in (None, block_hash), f"block {block} has another hash"
        if self._hash_of[block] is None:
            self._hash_of[block] = block_hash
            self._note(block_hash, stored=True)
            if self._below is not None and block_hash not in self._below:
                self._unsaved_in_use[block] = None
                if self.on_unsaved is not None:
                    self.on_unsaved()
        return True

    def follows(self, block_hash: BlockHash, parent: BlockHash | None) -> None:
        """A block comes after another one of its prompt, or is the first: windows reach back."""
        self._news.follows(block_hash, parent)

    @property
    def turn(self) -> int:
        """Number of calls of `release` so far: a mark in time for `num_room`."""
        return self._turn

    def num_room(self, turn: int, limit: int) -> int:
        """Counts blocks that can be had without evicting blocks released after `turn`.

        The count stops at `limit`. The cost is linear in the evictable blocks that are counted.
        """
        room = min(self._empty.num_blocks, limit)
        for released in islice(self._evictable.values(), limit - room):
            if released > turn:
                break
            room += 1
        return room

    def evict_first(self, hashes: Sequence[BlockHash]) -> int:
        """Makes evictable blocks the next ones to evict, the last of `hashes` first.

        Returns:
            The number of blocks moved to the front; the others are in use or not cached.
        """
        found = 0
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is not None and block in self._evictable:
                self._evictable[block] = 0
                self._evictable.move_to_end(block, last=False)
                self._unsaved.pop(block, None)  # other workers hold it too: no copy is made
                found += 1
        return found

    def oldest(self, limit: int) -> list[BlockHash]:
        """Returns the hashes of up to `limit` blocks that are evicted next, the next one first."""
        keys = (self._hash_of[block] for block in islice(self._evictable, limit))
        return [key for key in keys if key is not None]

    # --- tiers below -------------------------------------------------------------------------

    @property
    def num_empty(self) -> int:
        """Number of blocks that hold nothing."""
        return self._empty.num_blocks

    @property
    def num_safe(self) -> int:
        """Number of blocks that can be taken without loss: empty, or with a copy below."""
        return self.num_free - len(self._unsaved)

    def unsaved(self, limit: int) -> list[UnsavedBlock]:
        """Returns up to `limit` blocks without a copy below: evictable ones first, oldest first."""
        found = []
        for block in islice(chain(self._unsaved, self._unsaved_in_use), limit):
            key = self._hash_of[block]
            assert key is not None, f"block {block} has no hash"
            found.append(UnsavedBlock(block, key, self._lives[block]))
        return found

    def saving(self, blocks: Sequence[UnsavedBlock]) -> None:
        """Records that copies of these blocks are being made; they are no longer `unsaved`."""
        for each in blocks:
            self._unsaved.pop(each.block, None)
            self._unsaved_in_use.pop(each.block, None)

    def is_same(self, block: UnsavedBlock) -> bool:
        """Returns whether a block still holds the same KV: it was not evicted in between."""
        return self._lives[block.block] == block.life

    def lost_below(self, key: BlockHash) -> None:
        """Records that a tier below no longer has a block.

        If the pool has the block, it is not copied again before it is used. Otherwise a tier that
        is smaller than the pool's cached blocks would be rewritten forever.
        """
        if key in self._block_of:
            return
        if self._below is not None and key in self._below:
            self._lowered(self._below, key)
        else:
            self._gone(key)

    def came_below(self, key: BlockHash) -> None:
        """Records that a tier has a block now that came from outside of this worker."""
        if key not in self._block_of and self._below is not None:
            self._news.stored(key)
            self._lowered(self._below, key)

    def _lowered(self, below: LowerCopies, key: BlockHash) -> None:
        tier = below.tier_of(key)
        assert tier is not None, "a block that left for a tier is there"
        self._news.lowered(key, tier)
        if self.on_lowered is not None and is_announced(key):
            self.on_lowered(key)

    def clear_cached(self, num: int | None = None) -> int:
        """Evicts the next `num` evictable blocks, or all; returns how many."""
        return self._evict(len(self._evictable) if num is None else num)

    @property
    def has_events(self) -> bool:
        """Whether `take_events` has anything to tell."""
        return bool(self._news)

    def take_events(self) -> BlockEvents:
        """Returns the names that came and went since the last call, in order, net of both."""
        return self._news.take()

    def held_hashes(self) -> list[BlockHash]:
        """Returns all hashes that can be matched now or brought up, oldest first."""
        below = [] if self._below is None else self._below.keys()
        return [key for key in dict.fromkeys((*below, *self._block_of)) if is_announced(key)]

    def told_names(self) -> list[BlockHash]:
        """Returns all names that others hold by the events of `take_events`; for a snapshot."""
        return self._news.names(self.held_hashes())

    def statistics(self) -> BlockPoolStatistics:
        """The counts of this moment."""
        return BlockPoolStatistics(
            num_blocks=self.num_blocks,
            num_empty=self._empty.num_blocks,
            num_evictable=len(self._evictable),
            num_referenced=self.num_blocks - self.num_free,
            num_hashed=len(self._block_of),
            num_free_segments=self._empty.num_segments,
            largest_free_segment=self._empty.largest,
            allocated_total=self._allocated_total,
            evicted_total=self._evicted_total,
        )

    def _make_contiguous(self, n: int) -> None:
        """Evicts more blocks until one segment holds `n` blocks, if that is possible.

        The first pass evicts oldest first. Blocks that were cached together are evicted together,
        so segments grow fast, and room that this request does not use serves the next ones.
        The second pass runs if blocks in use lie between all evictable ones. It evicts the cached
        blocks at the end of the tightest run without blocks in use, if at least half of the room
        is empty there. Blocks evicted out of turn may be wanted soon: without this bound a
        replayed trace lost 6 % of its prefix hits (benchmarks/allocator.py).
        """
        bound = n + int(self.num_blocks * CONTIGUITY_SHARE)
        while self._evictable and self._empty.largest < n and self._empty.num_blocks < bound:
            self._evict(min(max(n // 4, 1), bound - self._empty.num_blocks))
        if self._empty.largest < n and (run := self._runs().find(n)) is not None:
            # The end of the run, since parents come before their children as a rule.
            end = run.stop
            cached = [block for block in range(end - n, end) if block in self._evictable]
            if len(cached) <= n // 2:
                self._drop(cached)

    def _evict(self, n: int) -> int:
        """Empties the `n` oldest evictable blocks, or all of them; returns how many."""
        self._drop(victims := list(islice(self._evictable, max(n, 0))))
        return len(victims)

    def _drop(self, victims: Sequence[int]) -> None:
        """Empties evictable blocks."""
        for block in victims:
            del self._evictable[block]
            block_hash = self._hash_of[block]
            assert block_hash is not None, f"evictable block {block} has no hash"
            self._hash_of[block] = None
            self._lives[block] += 1
            self._unsaved.pop(block, None)
            del self._block_of[block_hash]
            self._note(block_hash, stored=False)
        self._empty.add(victims)
        self._evicted_total += len(victims)

    def _move(self, blocks: Sequence[int]) -> None:
        """Records that the reference counts of blocks changed."""
        self._moved.update(blocks)
        if len(self._moved) > MAX_MOVED:
            self._runs()

    def _runs(self) -> FreeSegments:
        """Updates and returns the unreferenced blocks as segments."""
        came: list[int] = []
        went: list[int] = []
        for block in sorted(self._moved):
            is_unreferenced = not self._references[block]
            if is_unreferenced != bool(self._was_unreferenced[block]):
                self._was_unreferenced[block] = is_unreferenced
                (came if is_unreferenced else went).append(block)
        self._moved.clear()
        for first, count in consecutive_runs(went):
            self._unreferenced.remove(first, count)
        self._unreferenced.add(came)
        return self._unreferenced

    def _note(self, key: BlockHash, *, stored: bool) -> None:
        """Reports that a block was added to the pool or dropped from it."""
        below = self._below
        if below is None or key not in below:
            if stored:
                self._news.stored(key)
            else:
                self._gone(key)
        elif stored:
            self._news.raised(key)
        else:
            below.left(key)
            self._lowered(below, key)

    def _gone(self, key: BlockHash) -> None:
        if self.on_removed is not None and is_announced(key):
            self.on_removed(key)
        self._news.removed(key)

    def check_integrity(self) -> None:
        """Raises AssertionError if the records contradict each other. Costs O(num_blocks)."""
        self._empty.check_integrity()
        self._runs().check_integrity()
        empty = set(_blocks_of(self._empty))
        unreferenced = set(_blocks_of(self._unreferenced))
        assert empty <= set(range(self.num_blocks)), "a free segment is outside of the pool"
        for block, (references, block_hash) in enumerate(
            zip(self._references, self._hash_of, strict=True)
        ):
            assert references >= 0, f"block {block} has {references} references"
            states = (block in empty, block in self._evictable, references > 0)
            assert sum(states) == 1, f"block {block}: empty, evictable, referenced = {states}"
            if block in empty:
                assert block_hash is None, f"empty block {block} has a hash"
            if block in self._evictable:
                assert block_hash is not None, f"evictable block {block} has no hash"
            if block_hash is not None:
                assert self._block_of.get(block_hash) == block, f"block {block} cannot be found"
        assert unreferenced == empty | set(self._evictable), "what is unreferenced is not known"
        num_hashed = sum(block_hash is not None for block_hash in self._hash_of)
        assert len(self._block_of) == num_hashed, "a hash names a block that does not have it"
        held = self.held_hashes()
        outside = [key for key in held if key not in self._block_of]
        self._news.check_integrity(
            held, {} if self._below is None else dict(with_tiers(self._below, outside))
        )
        assert self._unsaved.keys() <= self._evictable.keys(), "an unsaved block is in use"
        for block in self._unsaved_in_use:
            assert self._references[block] > 0, f"unsaved block {block} is not in use"
            assert self._hash_of[block] is not None, f"unsaved block {block} is not full"


def _blocks_of(segments: FreeSegments) -> Iterator[int]:
    for start, length in segments.segments():
        yield from range(start, start + length)
