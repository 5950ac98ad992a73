"""Room for the KV of a prefix that arrives from another worker. No I/O, no torch.

The arriving blocks make the prefix resumable in every group. Their order is that of a handoff
(`groups.arriving_blocks`), so holder and reader agree on it from lengths alone.
Tests: tests/unit/kv/test_prefix_room.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from kvmesh.core.errors import OutOfBlocksError
from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import BlockHash
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.groups import (
    HOLE,
    ArrivingBlock,
    arriving_blocks,
    arriving_keys,
    first_visible,
    group_key,
    resume_length,
    state_key,
)
from kvmesh.kv.sequence_blocks import GroupCache, SequenceBlocks
from kvmesh.kv.tiers import at_once


@dataclass(slots=True)
class PrefixRoom:
    """Blocks that will receive a prefix; `kv` or this record holds each of them.

    Attributes:
        num_held: number of leading block indices that were there before.
        length: number of block indices of the prefix, including those.
        blocks: blocks to fill, in the order of a handoff.
        kinds: their kinds, see `ArrivingBlock`.
        state: the blocks among them that hold a state.
        before: block tables of `kv` before the room was opened.
        had_state: whether `kv` held a live state already.
    """

    kv: SequenceBlocks
    num_held: int
    length: int
    before: list[list[int]]
    had_state: bool
    state: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)


class PrefixRooms:
    """Opens rooms over the blocks of sequences, and turns received KV into a cached prefix."""

    def __init__(self, cache: GroupCache, pool: BlockPool, groups: KvGroups) -> None:
        self._cache = cache
        self._pool = pool
        self._groups = groups
        self._size = pool.block_size

    def next_piece(self, hashes: Sequence[BlockHash], num_held: int) -> Sequence[BlockHash]:
        """Returns the blocks to bring up at a time for a reader with `num_held` indices.

        With full attention alone these are blocks that the reader lacks, as many as fit. With
        windows or states a reader can resume from the whole prefix only.
        """
        if self._groups != KvGroups():
            return hashes
        rest = hashes[num_held:]
        num_kept = sum(1 for _ in takewhile(self._is_kept, rest))
        return rest[: at_once(num_kept, self._pool.num_free)]

    def leased(
        self, hashes: Sequence[BlockHash], num_held: int, most: int
    ) -> tuple[int, list[int]]:
        """Leases the cached blocks from which a reader with `num_held` indices can resume.

        Args:
            most: maximum number of blocks with full attention alone; else a prefix is leased whole.

        Returns:
            The prefix's length in blocks, at most `num_held` when the reader gains nothing, and
            the blocks in the order of a handoff, with a reference on each.
        """
        if self._groups == KvGroups():
            # The reader has the blocks before these, so this pool may lack them. Those that are
            # here count as used, since nobody can use the others without them.
            self._cache.release(self._cache.resume(hashes[:num_held]))
            blocks = self._pool.match(hashes[num_held : num_held + most])
            self._pool.acquire(blocks)
            return num_held + len(blocks), blocks
        kv = self._cache.resume(hashes)
        length = kv.num_sealed
        arriving = self._arriving(kv, kv.source, num_held, length) if length > num_held else []
        blocks = [each.block for each in arriving]
        self._pool.acquire(blocks)
        self._cache.release(kv)
        return length, blocks

    def adopt(self, kv: SequenceBlocks, hashes: Sequence[BlockHash]) -> int:
        """Replaces blocks of `kv` by blocks of its prefix that are cached by now.

        Args:
            hashes: blocks that may come from the cache. `kv` has computed nothing after its
                shared blocks.

        Returns:
            Number of leading blocks after which `kv` can be resumed now.
        """
        found = self._cache.resume(hashes)
        length = found.num_sealed
        if length <= kv.num_sealed:
            self._cache.release(found)
            return kv.num_sealed
        for mine, cached in zip(kv.tables, found.tables, strict=True):
            given_up = [block for block in mine[:length] if block != HOLE]
            mine[:length] = cached
            self._pool.release(given_up)
        self._pool.release(kv.source)
        kv.source, kv.num_sealed = found.source, length
        return length

    def open(self, kv: SequenceBlocks, length: int, num_tokens: int = 0) -> PrefixRoom:
        """Makes `kv` hold the blocks that it needs to resume after `length` blocks.

        Args:
            num_tokens: positions up to here are computed while the prefix arrives; 0 for none.

        Raises:
            OutOfBlocksError: `kv` is unchanged.
        """
        assert length > kv.num_sealed, "nothing would arrive"
        before = [list(table) for table in kv.tables]
        room = PrefixRoom(kv, kv.num_sealed, length, before, bool(kv.state))
        try:
            self._cache.reserve(kv, length * self._size, 0)
            room.state = self._pool.allocate(self._groups.state_blocks)
            if num_tokens:
                self._cache.grow(kv, length * self._size, num_tokens)
        except OutOfBlocksError:
            self._undo(room)
            raise
        arriving = self._arriving(kv, room.state, room.num_held, length)
        room.blocks = [each.block for each in arriving]
        room.kinds = [each.kind for each in arriving]
        return room

    def close(self, room: PrefixRoom, hashes: Sequence[BlockHash], num_filled: int) -> int:
        """Registers the received blocks, so that `kv` and others can resume, and undoes the rest.

        Args:
            hashes: hashes of the prefix, from the first block on.
            num_filled: number of leading blocks of the room that hold their KV.

        Returns:
            Number of leading blocks of the prefix after which `kv` can be resumed now.
        """
        if num_filled < len(room.blocks) and not (num_filled and self._groups == KvGroups()):
            # An incomplete window or state cannot be resumed from.
            self._undo(room)
            return room.num_held
        kv = room.kv
        length = room.length
        if num_filled < len(room.blocks):
            length = room.num_held + num_filled
        self._share(kv, room.num_held, length, hashes)
        self._cache.seal(kv, length * self._size, hashes)
        self._forget_windows(kv, length)
        if self._groups.state_blocks:
            for part, block in enumerate(room.state):
                room.state[part] = self._seal_once(block, state_key(hashes[length - 1], part))
            self._pool.release(kv.source)
            kv.source = room.state
        return length

    def _seal_once(self, block: int, key: BlockHash) -> int:
        """Registers a block, or swaps it for the block that already has the name."""
        if self._pool.seal(block, key):
            return block
        cached = self._pool.find(key)
        assert cached is not None, "a name that is taken is a block's"
        self._pool.acquire([cached])
        self._pool.release([block])
        return cached

    def resumable(
        self, hashes: Sequence[BlockHash], also: Collection[BlockHash] = frozenset()
    ) -> int:
        """Counts the leading blocks of a resumable prefix, including blocks in lower tiers.

        Args:
            also: names of blocks that could come from elsewhere.
        """
        groups = self._groups

        def is_kept(key: BlockHash) -> bool:
            return self._is_kept(key) or key in also

        def has_state(length: int) -> bool:
            last = hashes[length - 1]
            return all(is_kept(state_key(last, part)) for part in range(groups.state_blocks))

        return resume_length(
            groups,
            len(hashes),
            self._size,
            lambda group, index: is_kept(group_key(hashes[index], group)),
            has_state,
        )

    def _is_kept(self, key: BlockHash) -> bool:
        below = self._pool.below
        return self._pool.find(key) is not None or (below is not None and key in below)

    def lacking(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Returns the names of all blocks of a prefix that neither pool nor tiers have."""
        groups = self._groups
        named = (
            name
            for block_hash in hashes
            for name in (
                *(group_key(block_hash, group) for group in range(len(groups.windows))),
                *(state_key(block_hash, part) for part in range(groups.state_blocks)),
            )
        )
        return [name for name in named if not self._is_kept(name)]

    def missing(self, hashes: Sequence[BlockHash], num_held: int, length: int) -> list[BlockHash]:
        """Returns the names of the blocks of `open`, in its order, with `num_held` held before."""
        return arriving_keys(self._groups, hashes, range(num_held, length), self._size)

    def _share(self, kv: SequenceBlocks, first: int, end: int, hashes: Sequence[BlockHash]) -> None:
        """Replaces received blocks by blocks that were computed here in the meantime."""
        for group, table in enumerate(kv.tables):
            for index in range(first, end):
                mine, cached = table[index], self._pool.find(group_key(hashes[index], group))
                if mine != HOLE and cached is not None and cached != mine:
                    self._pool.acquire([cached])
                    table[index] = cached
                    self._pool.release([mine])

    def _arriving(
        self, kv: SequenceBlocks, state: Sequence[int], num_held: int, length: int
    ) -> list[ArrivingBlock]:
        span, num_tokens = range(num_held, length), length * self._size
        return arriving_blocks(self._groups, kv.tables, state, span, num_tokens, self._size)

    def _forget_windows(self, kv: SequenceBlocks, length: int) -> None:
        """Releases the blocks before the windows of the new position."""
        for window, table in zip(self._groups.windows, kv.tables, strict=True):
            first = first_visible(window, length * self._size, self._size)
            self._pool.release([block for block in table[:first] if block != HOLE])
            table[:first] = [HOLE] * min(first, len(table))

    def _undo(self, room: PrefixRoom) -> None:
        kv = room.kv
        for table, old in zip(kv.tables, room.before, strict=True):
            added = [
                block
                for index, block in enumerate(table)
                if block != HOLE and (index >= len(old) or old[index] == HOLE)
            ]
            table[:] = old
            self._pool.release(added)
        self._pool.release(room.state)
        room.state = []
        if not room.had_state:
            self._pool.release(kv.state)
            kv.state = []
