"""Tiers below the block pool (host memory, then disk): which block's copy lies where. Pure.

A block is copied to a tier below before it is evicted, as an operating system writes dirty pages
ahead of need, and the copy stays below when the block is loaded into the pool again. So eviction
itself copies nothing, and a block that is read often is usually copied down only once.

What happens when:

    pool half full          blocks without a copy below are copied: the evictable ones first,
                            oldest first; then full blocks in use, so that they have a copy
                            when their sequence ends
    tier full               its oldest copy is dropped. If the tier below has none yet, the next
                            copy waits for it, unless the pool is about to evict blocks without
                            a copy: then the oldest is lost
    evicted from the pool   the block's copies count as used at that moment, so a tier keeps
                            what was used last
    loaded into the pool    the copies count as used likewise, the end of a prefix before its
                            start, so that the end is evicted first

Every full block is copied down, except blocks that other workers also hold and that were not read
here since the pool got that information (`BlockPool.evict_first`).

Source: PrfaaS §3.2, TokenLake §4.4.
Tests: tests/property/test_tiers.py, tests/property/test_tier_files.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvmesh.core.pool import OldBlocks
from kvmesh.core.types import BlockHash

EMPTY_SHARE = 0.5
"""Copying to the tier below starts when less than this share of a pool or tier is empty.

Eviction is near then, so every full block gets a copy below. A pool that never fills this far
copies nothing. Half, so that even the largest prompts find empty blocks before anything is lost.
"""


NEARLY_FULL_SHARE = 1 / 8
"""Fraction of empty places below which a pool or tier counts as nearly full."""


def is_nearly_full(num_empty: int, num_places: int) -> bool:
    """Whether a pool or tier evicts soon."""
    return num_empty < NEARLY_FULL_SHARE * num_places


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """The counts of one tier.

    Attributes:
        num_places: size of the tier, in blocks.
        num_kept: blocks whose copies the tier holds now.
        stored_total, loaded_total, evicted_total, lost_total: blocks since the start. A lost
            one had a copy that could not be read back.
    """

    name: str
    num_places: int
    num_kept: int
    stored_total: int
    loaded_total: int
    evicted_total: int
    lost_total: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A block's copy in a tier: the place where it is being written, or from which it is read."""

    key: BlockHash
    place: int


class Tier:
    """The places of one tier, each one block in size, and which block's copy each of them holds.

    A place is free, is being written, or keeps a copy; or its copy was dropped while it is
    still being read, and it becomes free when the last read ends.
    """

    def __init__(self, name: str, num_places: int) -> None:
        assert num_places > 0, "a tier has a place"
        self.name = name
        self.num_places = num_places
        self._free = list(range(num_places - 1, -1, -1))  # the first ones are taken first
        self._writing: dict[BlockHash, int] = {}
        self._place_of: OrderedDict[BlockHash, int] = OrderedDict()  # oldest first
        self._readers: dict[int, int] = {}
        self._given_up: set[int] = set()
        # Blocks that the tier below has no copy of, usually oldest first; empty if no tier is
        # below.
        self._unsaved: OrderedDict[BlockHash, None] = OrderedDict()
        self._stored = self._evicted = self._lost = 0
        self.loaded_total = 0
        """Blocks loaded from this tier into the pool."""

    def __contains__(self, key: object) -> bool:
        return key in self._place_of

    def __len__(self) -> int:
        return len(self._place_of)

    def knows(self, key: BlockHash) -> bool:
        """Whether the tier has a copy of the block, or one is being written."""
        return key in self._place_of or key in self._writing

    @property
    def num_free(self) -> int:
        """Number of free places."""
        return len(self._free)

    def __iter__(self) -> Iterator[BlockHash]:
        """The blocks whose copies the tier holds, oldest first."""
        return iter(self._place_of)

    def adopt(self, copies: Iterable[Copy]) -> None:
        """Records copies that already lie in places, such as those an earlier process left on disk.

        Must be called before anything else is written here.

        Args:
            copies: oldest first.
        """
        assert len(self._free) == self.num_places, "only at the start"
        for each in copies:
            self._place_of[each.key] = each.place
        taken = set(self._place_of.values())
        assert len(taken) == len(self._place_of), "a place is taken twice"
        self._free = [place for place in range(self.num_places - 1, -1, -1) if place not in taken]

    def begin_write(
        self, keys: Iterable[BlockHash], *, may_lose: bool = True
    ) -> tuple[list[Copy], list[BlockHash]]:
        """Reserves places for the blocks that the tier lacks; evicts its oldest copies as needed.

        Stops at the first block for which no place can be freed, because every copy is
        being read or written.

        Args:
            may_lose: whether a copy may be evicted that the tier below does not have yet.

        Returns:
            The copies to write, and the blocks whose copies were evicted for them.
        """
        copies: list[Copy] = []
        gone: list[BlockHash] = []
        for key in keys:
            if self.knows(key):
                continue
            if not self._free and not self._evict_oldest(gone, may_lose=may_lose):
                break
            place = self._free.pop()
            self._writing[key] = place
            copies.append(Copy(key, place))
        return copies, gone

    def _evict_oldest(self, gone: list[BlockHash], *, may_lose: bool) -> bool:
        for key, place in self._place_of.items():
            if place not in self._readers:
                if key in self._unsaved and not may_lose:
                    return False  # copies go down oldest first: this one is next
                self._remove(key)
                self._evicted += 1
                gone.append(key)
                return True
        return False

    def _remove(self, key: BlockHash) -> None:
        place = self._place_of.pop(key)
        self._unsaved.pop(key, None)
        if place in self._readers:
            self._given_up.add(place)
        else:
            self._free.append(place)

    def end_write(self, copy: Copy, *, is_good: bool, is_saved: bool) -> None:
        """Records that writing a copy has ended.

        Args:
            is_good: whether the write succeeded; if not, the place becomes free again.
            is_saved: whether the copy needs none below it: the next tier below has one
                already, or there is no tier below.
        """
        place = self._writing.pop(copy.key)
        assert place == copy.place, "another copy of the same block"
        if not is_good:
            self._free.append(place)
            return
        self._place_of[copy.key] = place
        self._stored += 1
        if not is_saved:
            self._unsaved[copy.key] = None

    def holds(self, copy: Copy) -> bool:
        """Whether this copy is still the tier's copy of its block."""
        return self._place_of.get(copy.key) == copy.place

    def begin_read(self, key: BlockHash) -> Copy:
        """Starts a read of a block's copy; its place is not reused until `end_read`."""
        place = self._place_of[key]
        self._readers[place] = self._readers.get(place, 0) + 1
        return Copy(key, place)

    def end_read(self, copy: Copy, *, is_good: bool) -> bool:
        """Ends a read of a copy, and drops the copy if it could not be read.

        Returns:
            Whether this call dropped the copy.
        """
        left = self._readers[copy.place] - 1
        if left:
            self._readers[copy.place] = left
        else:
            del self._readers[copy.place]
        if copy.place in self._given_up:
            if not left:
                self._given_up.discard(copy.place)
                self._free.append(copy.place)
            return False
        if not is_good:
            self._lost += 1
            self._remove(copy.key)
        return not is_good

    def touch(self, key: BlockHash) -> None:
        """Counts a block's copy as used now, if the tier has one."""
        if key in self._place_of:
            self._place_of.move_to_end(key)
            if key in self._unsaved:
                self._unsaved.move_to_end(key)

    def evict_first(self, key: BlockHash) -> None:
        """Makes a block's copy the next one to leave; the tier below gets none of it."""
        if key in self._place_of:
            self._place_of.move_to_end(key, last=False)
            self._unsaved.pop(key, None)

    def unsaved(self, limit: int) -> list[BlockHash]:
        """At most `limit` blocks that the tier below has no copy of, oldest first."""
        return list(islice(self._unsaved, limit))

    def saved(self, key: BlockHash) -> None:
        """Records that the tier below has a copy of a block, or is about to write one.

        It is not copied down again, even if the copy below gets lost.
        """
        self._unsaved.pop(key, None)

    def statistics(self) -> TierStatistics:
        """The counts as they are now."""
        return TierStatistics(
            self.name,
            self.num_places,
            len(self._place_of),
            self._stored,
            self.loaded_total,
            self._evicted,
            self._lost,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when a place is lost or taken twice."""
        places = [*self._free, *self._writing.values(), *self._place_of.values(), *self._given_up]
        assert sorted(places) == list(range(self.num_places)), "a place is lost or taken twice"
        kept = set(self._place_of.values())
        assert self._readers.keys() <= kept | self._given_up, "a free place is read"
        assert self._given_up <= self._readers.keys(), "a place was given up and is read by nobody"
        assert self._unsaved.keys() <= self._place_of.keys(), "what is not kept cannot be saved"


class Tiers:
    """All tiers below one pool, the fastest first; the pool sees them as its `LowerCopies`.

    Args:
        on_lost: called with each block of which a tier dropped its copy.
    """

    def __init__(self, tiers: Sequence[Tier], on_lost: Callable[[BlockHash], None]) -> None:
        assert tiers, "without a tier there is nothing below"
        self._tiers = tuple(tiers)
        self._on_lost = on_lost

    def __contains__(self, key: object) -> bool:
        for tier in self._tiers:  # noqa: SIM110 - a load asks this of each block, several times
            if key in tier:
                return True
        return False

    def __getitem__(self, level: int) -> Tier:
        return self._tiers[level]

    def __len__(self) -> int:
        return len(self._tiers)

    def keys(self) -> list[BlockHash]:
        """Every block that some tier has a copy of, each once."""
        return list(dict.fromkeys(key for tier in reversed(self._tiers) for key in tier))

    def left(self, key: BlockHash) -> None:
        """See `LowerCopies.left`."""
        for tier in self._tiers:
            tier.touch(key)

    def find(self, key: BlockHash) -> int | None:
        """Index of the fastest tier that has a copy of the block; None if no tier has one."""
        for level, tier in enumerate(self._tiers):
            if key in tier:
                return level
        return None

    def tier_of(self, key: BlockHash) -> str | None:
        """See `LowerCopies.tier_of`."""
        return next((tier.name for tier in self._tiers if key in tier), None)

    def oldest(self, limit: int) -> list[OldBlocks]:
        """See `LowerCopies.oldest`."""
        return [
            OldBlocks(tier.name, tuple(islice(tier, limit)))
            for tier in self._tiers
            if is_nearly_full(tier.num_free, tier.num_places)
        ]

    def evict_first(self, keys: Sequence[BlockHash]) -> None:
        """See `LowerCopies.evict_first`."""
        for tier in self._tiers:
            for key in keys:
                tier.evict_first(key)

    def begin_write(
        self, level: int, keys: Iterable[BlockHash], *, may_lose: bool = True
    ) -> list[Copy]:
        """See `Tier.begin_write`."""
        copies, gone = self._tiers[level].begin_write(keys, may_lose=may_lose)
        for key in gone:
            self._on_lost(key)
        if level:
            for each in copies:
                self._tiers[level - 1].saved(each.key)
        return copies

    def end_write(self, level: int, copy: Copy, *, is_good: bool) -> None:
        """See `Tier.end_write`."""
        below = self._tiers[level + 1 : level + 2]
        is_saved = not below or copy.key in below[0]
        self._tiers[level].end_write(copy, is_good=is_good, is_saved=is_saved)

    def begin_read(self, keys: Iterable[BlockHash]) -> dict[int, list[Copy]]:
        """Starts reads of blocks' copies, each from the fastest tier that has one.

        The copies stay in their places until `end_read`, and count as used now.

        Args:
            keys: blocks of one prefix, in its order; those that no tier has are skipped.

        Returns:
            The copies to read, by tier index, in the order of `keys`.
        """
        found: dict[int, list[Copy]] = {}
        wanted = list(keys)
        for key in wanted:
            level = self.find(key)
            if level is not None:
                found.setdefault(level, []).append(self._tiers[level].begin_read(key))
        for key in reversed(wanted):
            self.left(key)
        return found

    def end_read(self, level: int, copy: Copy, *, is_good: bool) -> None:
        """See `Tier.end_read`."""
        tier = self._tiers[level]
        tier.loaded_total += is_good
        if tier.end_read(copy, is_good=is_good):
            self._on_lost(copy.key)

    def end_spill(self, source: Copy, copy: Copy, *, is_good: bool) -> None:
        """Ends a copy from the first tier to the second.

        If the source was found damaged and dropped meanwhile, its copy is damaged too.

        Args:
            source: what `Tier.begin_read` of the first tier returned.
            is_good: whether the write succeeded.
        """
        first = self._tiers[0]
        is_whole = first.holds(source)
        first.end_read(source, is_good=True)
        self.end_write(1, copy, is_good=is_good and is_whole)

    def statistics(self) -> list[TierStatistics]:
        """The counts of each tier, the fastest first."""
        return [tier.statistics() for tier in self._tiers]

    def check_integrity(self) -> None:
        """Raises AssertionError when the records contradict each other."""
        for tier in self._tiers:
            tier.check_integrity()


def at_once(num_blocks: int, num_free: int) -> int:
    """Returns the number of a prefix's blocks to load at a time, for another worker to read.

    All of them if they fit. Else half of the free room, so that requests keep the other half; the
    reader asks again for the rest.

    Args:
        num_blocks: leading blocks of the prefix that the pool or a tier has.
        num_free: blocks of the pool without references.
    """
    return num_blocks if num_blocks <= num_free else max(num_free // 2, 1)
