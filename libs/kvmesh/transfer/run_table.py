"""Many runs as one NumPy table, for operations on all of them at once.

As tuples, a thousand runs cost a millisecond on each side: to create them, to read them, and to
let the garbage collector scan them. A few runs stay tuples, which are cheaper then.
Tests: tests/unit/transfer/test_run_table.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from kvmesh.kv.runs import consecutive_runs

RunT = TypeVar("RunT", bound=tuple[int, ...])
OtherT = TypeVar("OtherT", bound=tuple[int, ...])
Numbers: TypeAlias = NDArray[np.int64]

MANY_RUNS = 16
"""Number of runs from which a table is cheaper than tuples."""


class RunTable(Sequence[RunT]):
    """Runs as a table, readable like a tuple of runs.

    Test for it with `type(runs) is RunTable`: `isinstance` with a `Sequence` costs more than all
    other work on a few runs.

    Attributes:
        numbers: [num_runs, fields of a run], the block count last; C order, read only.
    """

    __slots__ = ("_make", "numbers")

    def __init__(self, make: Callable[[Iterable[Any]], RunT], numbers: Numbers) -> None:
        """`make` is the `_make` method of the run's type."""
        self._make = make
        self.numbers = numbers

    @overload
    def __getitem__(self, index: int) -> RunT: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RunT, ...]: ...
    def __getitem__(self, index: int | slice) -> RunT | tuple[RunT, ...]:
        if isinstance(index, slice):
            return tuple(map(self._make, self.numbers[index].tolist()))
        return self._make(self.numbers[index].tolist())

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[RunT]:
        return map(self._make, self.numbers.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"

    def fields(
        self, make: Callable[[Iterable[Any]], OtherT], first: int, last: int
    ) -> RunTable[OtherT]:
        """Returns the columns `first` to `last` as runs of another type."""
        return RunTable(make, np.ascontiguousarray(self.numbers[:, first:last]))


def as_table(
    make: Callable[[Iterable[Any]], RunT], num_fields: int, runs: Sequence[RunT]
) -> Sequence[RunT]:
    """Returns the runs as a table, or unchanged if they are few or a table already."""
    if len(runs) < MANY_RUNS or isinstance(runs, RunTable):
        return runs
    numbers = np.fromiter(chain.from_iterable(runs), np.int64, num_fields * len(runs))
    return RunTable(make, numbers.reshape(-1, num_fields))


def as_runs(make: Callable[[Iterable[Any]], RunT], numbers: Numbers) -> Sequence[RunT]:
    """Returns a table of the runs, or tuples if they are few."""
    table = RunTable(make, numbers)
    return table if len(table) >= MANY_RUNS else table[:]


def numbers_of(runs: Sequence[tuple[int, ...]]) -> Numbers:
    """Returns the fields of one or more runs as rows of an array."""
    return runs.numbers if isinstance(runs, RunTable) else np.array(runs, dtype=np.int64)


def num_blocks_of(runs: Sequence[tuple[int, ...]]) -> int:
    """Returns the number of blocks of all runs."""
    if type(runs) is RunTable:
        return int(runs.numbers[:, -1].sum())
    return sum([run[-1] for run in runs])


def end_of(runs: Sequence[tuple[int, ...]]) -> int:
    """Returns one past the highest block of runs whose first field is their first block."""
    if type(runs) is RunTable:
        return int((runs.numbers[:, 0] + runs.numbers[:, -1]).max())
    return max([run[0] + run[-1] for run in runs])


def indexes_of(runs: Sequence[tuple[int, int]], num_blocks: int) -> Sequence[int]:
    """Returns every index of (first, count) runs, in order; a range if they are consecutive.

    Args:
        num_blocks: number of valid indexes. If runs exceed it in extent or count, the result is
            a range that exceeds it too, since a peer's frame may name any number of indexes.
    """
    most = max(end_of(runs), num_blocks_of(runs))
    if most > num_blocks:
        return range(most)
    if len(runs) == 1:
        first, count = runs[0]
        return range(first, first + count)
    if type(runs) is RunTable:
        indexes: list[int] = blocks_of(runs.numbers[:, 0], runs.numbers[:, 1]).tolist()
        return indexes
    return [index for first, count in runs for index in range(first, first + count)]


def runs_of_blocks(blocks: Sequence[int]) -> Sequence[tuple[int, int]]:
    """Variant of `consecutive_runs` that returns a table for many blocks."""
    if len(blocks) < MANY_RUNS:
        return consecutive_runs(blocks)
    numbers = np.array(blocks, np.int64)
    starts = np.flatnonzero(np.concatenate(([True], numbers[1:] != numbers[:-1] + 1)))
    lengths = np.diff(np.append(starts, len(numbers)))
    return as_runs(tuple, np.column_stack((numbers[starts], lengths)))


def blocks_of(first: Numbers, count: Numbers) -> Numbers:
    """Returns every block of runs with these first blocks and counts, in order."""
    ends = np.cumsum(count)
    blocks: Numbers = np.repeat(first - (ends - count), count) + np.arange(int(ends[-1]))
    return blocks
