"""Tiers below the pool of blocks, host memory and then disk: which block's copy lies where. Pure.

A copy goes down before its block is evicted, as a page cache is cleaned ahead of need, and stays
when the block comes up again: so eviction copies nothing, and what was read often costs one copy.

    pool half full          copies are made of the blocks that have none: the evictable ones, oldest
                            first, then full ones in use, so that their end finds them copied
    tier full               its oldest copy goes; the tier below has one by then, or it is lost
    evicted from the pool   its copies count as used just then, so a tier keeps what was used last
    brought up              likewise, the end of a prefix before its start: leaves go first

What goes down: all that is full, but for blocks that other workers hold too and nobody has read
here since that was said (`BlockPool.evict_first`).
Source: PrfaaS §3.2, TokenLake §4.4. Tests: tests/property/test_tiers.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvmesh.core.types import BlockHash

EMPTY_SHARE = 0.5
"""A pool or tier of which less is empty is about to evict: all that is full gets a copy below. What
never fills is copied by nobody; half, so that room for the largest prompts comes from what is empty
before anything is lost."""


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Of one tier.

    Attributes:
        num_places: its size in blocks.
        num_kept: blocks that it has now.
        stored_total, loaded_total, evicted_total, lost_total: blocks since the start; lost ones
            could not be read again.
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
    """A place of a tier that belongs to a copy, which is written or read."""

    key: BlockHash
    place: int


class Tier:
    """Places of one tier, each of a block's size, and what lies in them.

    A place is free, being written, kept, or given up while somebody reads it.
    """

    def __init__(self, name: str, num_places: int) -> None:
        assert num_places > 0, "a tier has a place"
        self.name = name
        self.num_places = num_places
        self._free = list(range(num_places))
        self._writing: dict[BlockHash, int] = {}
        self._place_of: OrderedDict[BlockHash, int] = OrderedDict()  # oldest first
        self._readers: dict[int, int] = {}
        self._given_up: set[int] = set()
        # What the tier below lacks, oldest first as a rule; it is empty without one.
        self._unsaved: OrderedDict[BlockHash, None] = OrderedDict()
        self._stored = self._evicted = self._lost = 0
        self.loaded_total = 0
        """Blocks that were read for the pool."""

    def __contains__(self, key: object) -> bool:
        return key in self._place_of

    def __len__(self) -> int:
        return len(self._place_of)

    def knows(self, key: BlockHash) -> bool:
        """Whether it has a block, or is being given it."""
        return key in self._place_of or key in self._writing

    @property
    def num_free(self) -> int:
        """Places that hold nothing."""
        return len(self._free)

    def __iter__(self) -> Iterator[BlockHash]:
        """What it has, oldest first."""
        return iter(self._place_of)

    def adopt(self, copies: Iterable[Copy]) -> None:
        """Takes over what lies in places already, oldest first; nothing else happened before."""
        assert len(self._free) == self.num_places, "only at the start"
        for each in copies:
            self._place_of[each.key] = each.place
        taken = set(self._place_of.values())
        assert len(taken) == len(self._place_of), "a place is taken twice"
        self._free = [place for place in range(self.num_places) if place not in taken]

    def begin_write(self, keys: Iterable[BlockHash]) -> tuple[list[Copy], list[BlockHash]]:
        """Places for blocks that are not here, as far as there are any.

        Returns:
            The copies to be made, and what had to go for them.
        """
        copies: list[Copy] = []
        gone: list[BlockHash] = []
        for key in keys:
            if self.knows(key):
                continue
            if not self._free and not self._evict_oldest(gone):
                break
            place = self._free.pop()
            self._writing[key] = place
            copies.append(Copy(key, place))
        return copies, gone

    def _evict_oldest(self, gone: list[BlockHash]) -> bool:
        for key, place in self._place_of.items():
            if place not in self._readers:
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
        """A copy is made.

        Args:
            is_good: it can be read; otherwise its place is free again.
            is_saved: a tier below has one, too, or there is none below.
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

    def begin_read(self, key: BlockHash) -> Copy:
        """Keeps a copy in its place until `end_read`."""
        place = self._place_of[key]
        self._readers[place] = self._readers.get(place, 0) + 1
        return Copy(key, place)

    def end_read(self, copy: Copy, *, is_good: bool) -> bool:
        """A copy was read; one that could not be is given up.

        Returns:
            Whether it was given up now.
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
        """Says that a block was used just now."""
        if key in self._place_of:
            self._place_of.move_to_end(key)
            if key in self._unsaved:
                self._unsaved.move_to_end(key)

    def unsaved(self, limit: int) -> list[BlockHash]:
        """At most `limit` blocks that the tier below lacks, oldest first."""
        return list(islice(self._unsaved, limit))

    def saved(self, key: BlockHash) -> None:
        """The tier below has a block, or is about to; one that gets lost there is lost."""
        self._unsaved.pop(key, None)

    def statistics(self) -> TierStatistics:
        """The counts of this moment."""
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
    """All tiers below one pool, the fastest first; the pool's `LowerCopies`.

    Args:
        on_lost: told of each block that one of them has no more.
    """

    def __init__(self, tiers: Sequence[Tier], on_lost: Callable[[BlockHash], None]) -> None:
        assert tiers, "without a tier there is nothing below"
        self._tiers = tuple(tiers)
        self._on_lost = on_lost

    def __contains__(self, key: object) -> bool:
        return any(key in tier for tier in self._tiers)

    def __getitem__(self, level: int) -> Tier:
        return self._tiers[level]

    def __len__(self) -> int:
        return len(self._tiers)

    def keys(self) -> list[BlockHash]:
        """All that can be brought up, each once."""
        return list(dict.fromkeys(key for tier in reversed(self._tiers) for key in tier))

    def left(self, key: BlockHash) -> None:
        """See `LowerCopies.left`."""
        for tier in self._tiers:
            tier.touch(key)

    def find(self, key: BlockHash) -> int | None:
        """The fastest tier that has a block."""
        return next((level for level, tier in enumerate(self._tiers) if key in tier), None)

    def tier_of(self, key: BlockHash) -> str | None:
        """See `LowerCopies.tier_of`."""
        return next((tier.name for tier in self._tiers if key in tier), None)

    def begin_write(self, level: int, keys: Iterable[BlockHash]) -> list[Copy]:
        """See `Tier.begin_write`."""
        copies, gone = self._tiers[level].begin_write(keys)
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
        """Keeps copies in their places until `end_read`, and says that they are used.

        Args:
            keys: of one prefix, in its order; those that no tier has are left out.

        Returns:
            By tier, in the order of `keys`.
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

    def statistics(self) -> list[TierStatistics]:
        """Of each tier."""
        return [tier.statistics() for tier in self._tiers]

    def check_integrity(self) -> None:
        """Raises AssertionError when the records contradict each other."""
        for tier in self._tiers:
            tier.check_integrity()
