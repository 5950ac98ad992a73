"""Who holds how much of a prefix, for fleets in which a common prefix is on every worker.

Sets of workers are the bits of one integer, so that a lookup over a thousand holders costs a few
machine operations instead of a thousand entries of a dict.
Tests: tests/unit/policy/test_holders.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from kvmesh.core.types import WorkerId

_WORD = 60
_WORD_MASK = (1 << _WORD) - 1


class Holders(Mapping[WorkerId, int]):
    """Leading blocks held by each worker; those that hold none are left out.

    Args:
        names: of the fleet, in order; a worker's place here is its bit.
        places: of each name.
        levels: `(blocks, workers)` from the most blocks to the fewest; no worker is in two.
    """

    __slots__ = ("_levels", "_names", "_places")

    def __init__(
        self,
        names: Sequence[WorkerId],
        places: Mapping[WorkerId, int],
        levels: list[tuple[int, int]],
    ) -> None:
        self._names = names
        self._places = places
        self._levels = levels

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
