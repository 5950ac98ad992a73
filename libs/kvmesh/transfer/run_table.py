"""Many runs as one table of numbers, for work on all of them at once.

As tuples, a thousand runs cost a millisecond on each side: making them, reading them, and having
the garbage collector walk over them. A few runs stay tuples, which are cheaper then.
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
"""From so many on a table is cheaper than tuples."""


class RunTable(Sequence[RunT]):
    """Runs, read like a tuple of them.

    To be asked for by `type(runs) is RunTable`: `isinstance` of a `Sequence` costs more than what a
    few runs cost otherwise.

    Attributes:
        numbers: [num_runs, fields of a run], the number of blocks last; C order, not to be written.
    """

    __slots__ = ("_make", "numbers")

    def __init__(self, make: Callable[[Iterable[Any]], RunT], numbers: Numbers) -> None:
        """`make` is `_make` of the run's type."""
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
        """Runs of another type, out of these columns."""
        return RunTable(make, np.ascontiguousarray(self.numbers[:, first:last]))


def as_table(
    make: Callable[[Iterable[Any]], RunT], num_fields: int, runs: Sequence[RunT]
) -> Sequence[RunT]:
    """The runs as a table, or as they are if they are few or a table already."""
    if len(runs) < MANY_RUNS or isinstance(runs, RunTable):
        return runs
    numbers = np.fromiter(chain.from_iterable(runs), np.int64, num_fields * len(runs))
    return RunTable(make, numbers.reshape(-1, num_fields))


def as_runs(make: Callable[[Iterable[Any]], RunT], numbers: Numbers) -> Sequence[RunT]:
    """A table, or tuples if they are few."""
    table = RunTable(make, numbers)
    return table if len(table) >= MANY_RUNS else table[:]


def numbers_of(runs: Sequence[tuple[int, ...]]) -> Numbers:
    """Runs, at least one, as rows of their fields."""
    return runs.numbers if isinstance(runs, RunTable) else np.array(runs, dtype=np.int64)


def num_blocks_of(runs: Sequence[tuple[int, ...]]) -> int:
    """Blocks of all runs together."""
    if type(runs) is RunTable:
        return int(runs.numbers[:, -1].sum())
    return sum([run[-1] for run in runs])


def end_of(runs: Sequence[tuple[int, ...]]) -> int:
    """The first number behind all blocks, of runs whose first field is their first block."""
    if type(runs) is RunTable:
        return int((runs.numbers[:, 0] + runs.numbers[:, -1]).max())
    return max([run[0] + run[-1] for run in runs])


def indexes_of(runs: Sequence[tuple[int, int]], num_blocks: int) -> Sequence[int]:
    """Every index that (first, count) runs name, in order; a range where they follow one another.

    Args:
        num_blocks: of what is indexed. Of runs that reach beyond it, or name more, the answer is a
            range that does so too: a frame of a peer may name any number of indexes.
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
    """As `consecutive_runs`, of many blocks a table."""
    if len(blocks) < MANY_RUNS:
        return consecutive_runs(blocks)
    numbers = np.array(blocks, np.int64)
    starts = np.flatnonzero(np.concatenate(([True], numbers[1:] != numbers[:-1] + 1)))
    lengths = np.diff(np.append(starts, len(numbers)))
    return as_runs(tuple, np.column_stack((numbers[starts], lengths)))


def blocks_of(first: Numbers, count: Numbers) -> Numbers:
    """Every block of runs that begin at `first`, in order."""
    ends = np.cumsum(count)
    blocks: Numbers = np.repeat(first - (ends - count), count) + np.arange(int(ends[-1]))
    return blocks
