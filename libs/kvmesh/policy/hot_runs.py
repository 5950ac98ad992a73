"""Which prefixes are read much: segments that are read together are one run, and a run goes to one
place.

Source: TokenLake 4.3. Tests: tests/unit/policy/test_pool_plan.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvmesh.core.types import BLOCK_HASH_BYTES, BlockHash, WorkerId
from kvmesh.policy.heat import SegmentHeat

SAME_READS = 0.75
"""A segment read at least so often as its run's first belongs to the run."""

Held = Mapping[BlockHash, Mapping[WorkerId, int]]
"""By name of a run: leading blocks of its prefix that each worker holds; 0 may be left out."""


@dataclass(frozen=True, slots=True)
class HotRun:
    """Segments of one prefix, one after another, that are read together.

    Attributes:
        name: of its last segment.
        parent: the run before it in its prefix, whose end may be behind where this one begins.
        num_blocks: of the whole prefix up to its end.
        own_blocks: of the run alone.
        reads: of its last segment, of late.
    """

    name: BlockHash
    parent: BlockHash | None
    num_blocks: int
    own_blocks: int
    reads: float


@dataclass(slots=True)
class _Growing:
    """A run while its segments are collected; `first_reads` of its first one."""

    tail: SegmentHeat
    parent: _Growing | None
    first_reads: float
    before_blocks: int
    own_blocks: int

    @property
    def num_blocks(self) -> int:
        return self.before_blocks + self.own_blocks


def hot_runs(segments: Iterable[SegmentHeat], min_reads: float) -> list[HotRun]:
    """Joins segments into runs, the one with the most read first segment first.

    Args:
        segments: most read first, parents before children, as `HeatTable.hottest` gives them.
        min_reads: segments read less often are not hot.
    """
    runs: list[_Growing] = []
    run_of: dict[BlockHash, tuple[_Growing, int]] = {}  # with the blocks up to the segment's end
    for segment in segments:
        if segment.reads < min_reads:
            break
        size = len(segment.blocks) // BLOCK_HASH_BYTES
        found = None if segment.parent is None else run_of.get(segment.parent)
        run, before = (None, segment.depth * size) if found is None else found
        if (
            run is not None
            and run.tail.name == segment.parent
            and segment.reads >= SAME_READS * run.first_reads
        ):
            run.tail = segment
            run.own_blocks += size
        else:
            run = _Growing(segment, run, segment.reads, before, size)
            runs.append(run)
        run_of[segment.name] = (run, before + size)
    return [
        HotRun(
            run.tail.name,
            None if run.parent is None else run.parent.tail.name,
            run.num_blocks,
            run.own_blocks,
            run.tail.reads,
        )
        for run in runs
    ]


def leaves(runs: Iterable[HotRun]) -> list[HotRun]:
    """Runs that no other one goes on from: who holds these prefixes tells it of all."""
    runs = list(runs)
    parents = {run.parent for run in runs}
    return [run for run in runs if run.name not in parents]


def held_runs(runs: Iterable[HotRun], of_leaves: Held) -> dict[BlockHash, dict[WorkerId, int]]:
    """Who holds how much of every run, from what is known of the leaves.

    A run's end may lie behind the place where a leaf's prefix leaves it; then the leaf tells of the
    part before that place only, and another one of the rest.
    """
    by_name = {run.name: run for run in runs}
    held: dict[BlockHash, dict[WorkerId, int]] = {name: {} for name in by_name}
    for leaf, lengths in of_leaves.items():
        at: BlockHash | None = leaf
        shared = math.inf
        while at is not None and at in by_name:
            run = by_name[at]
            shared = min(shared, run.num_blocks)
            mine = held[at]
            for worker, length in lengths.items():
                mine[worker] = max(mine.get(worker, 0), int(min(length, shared)))
            shared = min(shared, run.num_blocks - run.own_blocks)
            at = run.parent
    return held
