"""Number of leading blocks that each worker holds; fast also where all workers hold a prefix.

Sets of workers are the bits of one integer, so that a lookup over a thousand holders costs a few
machine operations instead of a thousand entries of a dict.
Tests: tests/unit/policy/test_holders.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from kvmesh.core.types import WorkerId

_WORD = 60
_WORD_MASK = (1 << _WORD) - 1


Levels = list[tuple[int, int]]
"""Pairs of a block count and the bit set of workers that hold as many, largest count first.

A worker is in one pair only."""


class Lower(NamedTuple):
    """Number of a worker's leading blocks that lie in host memory and on disk, below its pool."""

    host: int = 0
    disk: int = 0


NOTHING_LOWER = Lower()


class Holders(Mapping[WorkerId, int]):
    """Mapping from each worker to its number of leading blocks, without workers that hold none.

    Args:
        names: the fleet's workers in order; a worker's index is its bit.
        places: index of each name.
        levels: block counts in any tier, up to where a prompt can resume.
        in_pool, in_memory: block counts in the pool, and in pool or host memory. None if no holder
            has blocks below its pool.
    """

    __slots__ = ("_in_memory", "_in_pool", "_levels", "_names", "_places")

    def __init__(
        self,
        names: Sequence[WorkerId],
        places: Mapping[WorkerId, int],
        levels: Levels,
        in_pool: Levels | None = None,
        in_memory: Levels | None = None,
    ) -> None:
        self._names = names
        self._places = places
        self._levels = levels
        self._in_pool = in_pool
        self._in_memory = in_memory

    def __getitem__(self, worker_id: WorkerId) -> int:
        blocks = self.get(worker_id)
        if blocks is None:
            raise KeyError(worker_id)
        return int(blocks)

    # Not inherited, for speed: most lookups are for workers that hold nothing.
    def get(self, worker_id: WorkerId, default: Any = None, /) -> Any:
        """Returns the number of blocks of a worker, or the default."""
        place = self._places.get(worker_id)
        if place is not None:
            for blocks, workers in self._levels:
                if workers >> place & 1:
                    return blocks
        return default

    def __iter__(self) -> Iterator[WorkerId]:
        return (name for _, name in self._pairs())

    def _pairs(self) -> Iterator[tuple[int, WorkerId]]:
        names = self._names
        for blocks, workers in self._levels:
            # 60 bits at a time: an operation on the whole integer would touch every worker's bit.
            low = workers.bit_length() // _WORD * _WORD
            while low >= 0:
                left = workers >> low & _WORD_MASK
                while left:
                    place = left.bit_length() - 1
                    yield blocks, names[low + place]
                    left ^= 1 << place
                low -= _WORD

    def __len__(self) -> int:
        return sum(workers.bit_count() for _, workers in self._levels)

    def __bool__(self) -> bool:
        return bool(self._levels)

    def lower(self, names: Sequence[WorkerId]) -> list[Lower] | None:
        """Returns each worker's blocks below its pool; see `lower_of`."""
        if self._in_pool is None or self._in_memory is None:
            return None
        found: list[Lower] = []
        for name, held in zip(names, self.of(names), strict=True):
            place = self._places.get(name)
            if not held or place is None:
                found.append(NOTHING_LOWER)
                continue
            in_memory = min(held, _blocks_at(self._in_memory, place))
            in_pool = min(in_memory, _blocks_at(self._in_pool, place))
            found.append(Lower(in_memory - in_pool, held - in_memory))
        return found

    def longest(self, count: int) -> list[tuple[int, WorkerId]]:
        """Returns up to `count` workers with the most blocks; see `longest_holders`."""
        return list(islice(self._pairs(), count))

    def of(self, names: Sequence[WorkerId]) -> list[int]:
        """Returns the number of blocks of each named worker; 0 for one that holds nothing."""
        levels, place_of = self._levels, self._places.get
        if not levels:
            return [0] * len(names)
        found: list[int] = []
        for name in names:
            place = place_of(name)
            held = 0
            if place is not None:
                for blocks, workers in levels:
                    if workers >> place & 1:
                        held = blocks
                        break
            found.append(held)
        return found


def _blocks_at(levels: Levels, place: int) -> int:
    return next((blocks for blocks, workers in levels if workers >> place & 1), 0)


class HeldBlocks(dict[WorkerId, int]):
    """Same mapping as `Holders` in a plain dict, for a fleet without numbered places.

    Attributes:
        below: for each holder, its blocks below the pool.
    """

    def __init__(self) -> None:
        super().__init__()
        self.below: dict[WorkerId, Lower] = {}

    def take(self, worker_id: WorkerId, blocks: int, lower: Lower) -> None:
        """Adds a match; the longest of several matches of one worker counts."""
        if blocks >= self.get(worker_id, 0):
            self[worker_id] = blocks
            self.below[worker_id] = lower


def lower_of(
    matches: Mapping[WorkerId, int] | None, names: Sequence[WorkerId]
) -> list[Lower] | None:
    """Returns each named worker's blocks below its pool; None if no worker has any."""
    if isinstance(matches, Holders):
        return matches.lower(names)
    if not isinstance(matches, HeldBlocks) or not any(map(any, matches.below.values())):
        return None
    return [matches.below.get(name, NOTHING_LOWER) for name in names]


def held_by(matches: Mapping[WorkerId, int] | None, names: Sequence[WorkerId]) -> list[int]:
    """Returns the number of leading blocks of each named worker; 0 where none are known."""
    if isinstance(matches, Holders):
        return matches.of(names)
    if not matches:
        return [0] * len(names)
    return [matches.get(name, 0) for name in names]


def longest_holders(matches: Mapping[WorkerId, int], count: int) -> list[tuple[int, WorkerId]]:
    """Returns up to `count` workers with the most blocks, each after its number of blocks.

    Ties go to the last by name, so that the order of the map does not matter.
    """
    if isinstance(matches, Holders):
        return matches.longest(count)
    return heapq.nlargest(count, zip(matches.values(), matches, strict=True))
