"""Finds hot prefixes: consecutive segments that are read together form a run, which is copied to
one worker as a whole.

Source: TokenLake 4.3 (heavy hitters). Tests: tests/unit/policy/test_pool_plan.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvmesh.core.types import BLOCK_HASH_BYTES, BlockHash, WorkerId
from kvmesh.policy.heat import SegmentHeat

MIN_READS = 8.0
"""Recent reads that make a prefix hot, unless the caller says otherwise."""

MAX_HOT_SEGMENTS = 256
"""Maximum number of segments per namespace among which hot prefixes are looked for."""

SAME_READS = 0.75
"""Minimum reads of a segment, as a fraction of those of its run's first, to belong to the run."""

Held = Mapping[BlockHash, Mapping[WorkerId, int]]
"""For each run's name, the number of leading blocks of its prefix that each worker holds; 0 may be
left out."""


@dataclass(frozen=True, slots=True)
class HotRun:
    """Consecutive segments of one prefix that are read together.

    Attributes:
        name: name of its last segment.
        parent: the run before it in its prefix; this run may branch off before the parent's end.
        num_blocks: blocks of the whole prefix up to the run's end.
        own_blocks: blocks of the run alone.
        reads: recent reads of its last segment.
    """

    name: BlockHash
    parent: BlockHash | None
    num_blocks: int
    own_blocks: int
    reads: float


@dataclass(slots=True)
class _Growing:
    """A run while its segments are collected; `first_reads` counts reads of its first segment."""

    tail: SegmentHeat
    parent: _Growing | None
    first_reads: float
    before_blocks: int
    own_blocks: int

    @property
    def num_blocks(self) -> int:
        return self.before_blocks + self.own_blocks


def hot_runs(segments: Iterable[SegmentHeat], min_reads: float) -> list[HotRun]:
    """Joins segments into runs, sorted by the reads of their first segment, most first.

    Args:
        segments: most read first, parents before children, as `HeatTable.hottest` returns them.
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
    """Returns the runs that no other run continues: their holders imply those of all runs."""
    runs = list(runs)
    parents = {run.parent for run in runs}
    return [run for run in runs if run.name not in parents]


def held_runs(runs: Iterable[HotRun], of_leaves: Held) -> dict[BlockHash, dict[WorkerId, int]]:
    """Returns how many blocks of each run's prefix each worker holds, given those of the leaves.

    A leaf's prefix may branch off before a run's end. That leaf then tells only about the part
    before the branch, and another leaf about the rest.
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
