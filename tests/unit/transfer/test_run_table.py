"""Tables of runs against tuples of them."""

import os
import random
from itertools import pairwise

import numpy as np
import pytest

from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.kv.runs import consecutive_runs
from kvmesh.transfer.alignment import Run, split_runs, tabled
from kvmesh.transfer.frames import BlockPart, BlockRun, PullFrame, PullRun
from kvmesh.transfer.memory import MappedPool, create_shared, run_views, write_views
from kvmesh.transfer.native import PlacedViews, num_bytes_of, ranges_of
from kvmesh.transfer.run_table import (
    RunTable,
    as_runs,
    blocks_of,
    end_of,
    indexes_of,
    num_blocks_of,
    runs_of_blocks,
)

BLOCK = 64


class Shared:
    """A pool in a memfd, of random bytes."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.fd, mapping = create_shared("test", num_blocks * BLOCK)
        mapping[:] = random.Random(1).randbytes(num_blocks * BLOCK)
        self._view = memoryview(mapping)

    def read_view(self, first_block: int, num_blocks: int) -> memoryview:
        return self._view[first_block * BLOCK : (first_block + num_blocks) * BLOCK]

    write_view = read_view


class Unmapped:
    """The same pool, as one that no peer can map."""

    def __init__(self, pool: Shared) -> None:
        self.num_blocks = pool.num_blocks
        self.read_view = self.write_view = pool.read_view


def some_runs(count: int) -> list[Run]:
    rng = random.Random(count)
    return [Run(rng.randrange(90), rng.randrange(90), rng.randrange(1, 10)) for _ in range(count)]


def test_a_table_reads_like_a_tuple() -> None:
    runs = some_runs(20)
    table = tabled(runs)
    assert isinstance(table, RunTable)
    assert tabled(table) is table
    assert isinstance(tabled(runs[:3]), list)
    assert table == tuple(runs) == table
    assert table != tuple(runs[:-1])
    assert hash(table) == hash(tuple(runs))
    assert (table[3], table[-1], table[2:5]) == (runs[3], runs[-1], tuple(runs[2:5]))
    assert type(table[0]) is Run
    assert str(runs[0]) in repr(table)
    assert num_blocks_of(table) == num_blocks_of(runs) == sum(run.count for run in runs)
    assert end_of(table) == end_of(runs) == max(run.source_start + run.count for run in runs)
    assert as_runs(Run._make, table.numbers[:2]) == tuple(runs[:2])


def test_blocks_of_runs_in_order() -> None:
    blocks = blocks_of(np.array([5, 0, 5]), np.array([2, 3, 1]))
    assert blocks.tolist() == [5, 6, 0, 1, 2, 5]


@pytest.mark.parametrize("part", [None, BlockPart(16, 8)])
def test_bytes_of_a_table_are_those_of_its_runs(part: BlockPart | None) -> None:
    pool, runs = Shared(100), some_runs(20)
    views = run_views(pool, tabled(runs), BLOCK, part)
    plain = run_views(Unmapped(pool), runs, BLOCK, part)
    written = write_views(pool, [(run[0], run[2]) for run in runs], BLOCK, part)
    assert isinstance(views, PlacedViews)
    assert isinstance(written, PlacedViews)
    assert isinstance(plain, list)
    for placed in (views, written):
        assert list(placed) == plain
        assert ranges_of(placed).tolist() == ranges_of(plain).tolist()
        assert num_bytes_of(placed) == num_bytes_of(plain)
        assert (placed[1], list(placed[2:4])) == (plain[1], plain[2:4])
    mapped = MappedPool(pool.fd, 100, BLOCK)
    first = mapped.byte_ranges([(0, 1)])[0][0]
    table, few = (np.array(mapped.byte_ranges(runs_, part)) for runs_ in (tabled(runs), runs))
    assert table.tolist() == few.tolist()
    assert table[0, 0] == first + runs[0][0] * BLOCK + (part.offset if part else 0)
    with pytest.raises(AssertionError, match="outside"):
        mapped.byte_ranges(tabled([Run(100, 0, 1)] * 20))
    mapped.close()
    os.close(pool.fd)


@pytest.mark.parametrize("num_runs", [3, 40])
def test_what_a_pull_writes_has_neighbours_joined(num_runs: int) -> None:
    rng, runs, at = random.Random(2), list[PullRun](), 0
    for _ in range(num_runs):
        at += rng.choice([0, 0, 5])
        runs.append(PullRun(rng.randrange(99), at, rng.randrange(1, 4)))
        at += runs[-1].count
    claim = WriteClaim(1, 2, 3, b"x")
    tables = [tuple(runs), RunTable(PullRun._make, np.array(runs))]
    few, many = (PullFrame(1, claim, table).as_put().runs for table in tables)
    assert tuple(few) == tuple(many)
    blocks = [i for first, count in few for i in range(first, first + count)]
    assert blocks == [i for _, first, count in runs for i in range(first, first + count)]
    assert all(a.first + a.count < b.first for a, b in pairwise(few))
    assert type(many[0]) is BlockRun


def test_a_cut_run_goes_on_in_the_next_group() -> None:
    runs = [Run(10 * i, 7 * i, 7) for i in range(20)]
    groups = split_runs(runs, 10, 1000)
    assert groups[0] == (Run(0, 0, 7), Run(10, 7, 3))
    assert groups[1] == (Run(13, 10, 4), Run(20, 14, 6))


@pytest.mark.parametrize("count", [1, 2, 40])
def test_indexes_of_runs_are_those_of_each_in_turn(count: int) -> None:
    runs = [BlockRun(run.target_start + 9 * i, run.count) for i, run in enumerate(some_runs(count))]
    many = as_runs(BlockRun._make, np.array(runs, np.int64))
    expected = [index for first, size in runs for index in range(first, first + size)]
    assert list(indexes_of(many, 10_000)) == list(indexes_of(runs, 10_000)) == expected


def test_indexes_that_nobody_has_are_not_spelt_out() -> None:
    far = [BlockRun(0, 1), BlockRun(2**32 - 1, 2**32 - 1)] * 20
    for runs in (far, far[1:2], as_runs(BlockRun._make, np.array(far, np.int64))):
        indexes = indexes_of(runs, 100)
        assert isinstance(indexes, range)
        assert len(indexes) > 100
    again = [BlockRun(0, 100), BlockRun(0, 100)]
    assert indexes_of(again, 100) == range(200)


@pytest.mark.parametrize("count", [1, 15, 16, 200])
def test_runs_of_many_blocks_are_those_of_few(count: int) -> None:
    rng = random.Random(count)
    for chance in (0.0, 0.5, 1.0):
        blocks = [7]
        while len(blocks) < count:
            near = rng.random() < chance
            blocks.append(blocks[-1] + 1 if near else rng.randrange(1000))
        assert list(runs_of_blocks(blocks)) == consecutive_runs(blocks)
