"""Who holds how much of a prefix, for fleets in which a common prefix is on every worker.

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
"""`(blocks, workers)` from the most blocks to the fewest; no worker is in two."""


class Lower(NamedTuple):
    """Of the leading blocks that a worker holds, those that are not in its pool."""

    host: int = 0
    disk: int = 0


NOTHING_LOWER = Lower()


class Holders(Mapping[WorkerId, int]):
    """Leading blocks held by each worker; those that hold none are left out.

    Args:
        names: of the fleet, in order; a worker's place here is its bit.
        places: of each name.
        levels: of all that can be resumed from.
        in_pool, in_memory: of leading blocks in pools, and in pools or host memory, where some
            holder has more than that; else None.
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

    # Written out, since most workers are asked for and few of them hold anything.
    def get(self, worker_id: WorkerId, default: Any = None, /) -> Any:
        """The blocks of a worker, or the default."""
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
            # In words, since each operation on an integer of all workers touches all of it.
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
        """As `lower_of`."""
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
        """As `longest_holders`."""
        return list(islice(self._pairs(), count))

    def of(self, names: Sequence[WorkerId]) -> list[int]:
        """The blocks of each of some workers, 0 of one that holds nothing; as `get` for each."""
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
    """As `Holders`, of a fleet whose places nobody keeps.

    Attributes:
        below: of each worker that holds blocks below its pool.
    """

    def __init__(self) -> None:
        super().__init__()
        self.below: dict[WorkerId, Lower] = {}

    def take(self, worker_id: WorkerId, blocks: int, lower: Lower) -> None:
        """Adds a match; of several of one worker the longest counts."""
        if blocks >= self.get(worker_id, 0):
            self[worker_id] = blocks
            self.below[worker_id] = lower


def lower_of(
    matches: Mapping[WorkerId, int] | None, names: Sequence[WorkerId]
) -> list[Lower] | None:
    """Of the leading blocks of each of some workers, those below its pool; None: of nobody any."""
    if isinstance(matches, Holders):
        return matches.lower(names)
    if not isinstance(matches, HeldBlocks) or not any(map(any, matches.below.values())):
        return None
    return [matches.below.get(name, NOTHING_LOWER) for name in names]


def held_by(matches: Mapping[WorkerId, int] | None, names: Sequence[WorkerId]) -> list[int]:
    """Leading blocks of each of some workers; 0 where none are known."""
    if isinstance(matches, Holders):
        return matches.of(names)
    if not matches:
        return [0] * len(names)
    return [matches.get(name, 0) for name in names]


def longest_holders(matches: Mapping[WorkerId, int], count: int) -> list[tuple[int, WorkerId]]:
    """Up to `count` workers that hold most, with how much; of equal ones the last by name, so that
    the order of the map decides nothing.
    """
    if isinstance(matches, Holders):
        return matches.longest(count)
    return heapq.nlargest(count, zip(matches.values(), matches, strict=True))
