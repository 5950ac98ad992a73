"""What the kvmanager orders for the pool of the workers' caches: copies of hot prefixes to less
loaded workers and away from leaving ones, and hints which copies of cold ones may leave first.

A worker can use a block only if it has all before it, so what is copied is a whole prefix, less
what the target has. Segments that are read together are one run, and a run goes to one place:
`plan_copies` and `plan_eviction` decide over runs as they do over segments in the simulator.
Source: TokenLake 4.3, 4.4. Tests: tests/unit/policy/test_pool_plan.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core.pool import PoolMember
from kvmesh.core.summary_statistics import coefficient_of_variation
from kvmesh.core.types import BLOCK_HASH_BYTES, BlockHash, WorkerId
from kvmesh.policy.heat import SegmentHeat
from kvmesh.policy.pool_eviction import plan_eviction
from kvmesh.policy.replication import CopyReason, plan_copies
from kvmesh.policy.segment_tree import Segment, SegmentTree

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


@dataclass(frozen=True, slots=True)
class PrefixCopy:
    """A prefix to copy.

    Attributes:
        run: name of the run that ends it.
        num_blocks: that the target lacks.
    """

    run: BlockHash
    source: WorkerId
    target: WorkerId
    num_blocks: int
    num_bytes: int
    reason: CopyReason


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Bounds of one plan.

    Attributes:
        budget_bytes: copies are planned while less than this is spent; the last may exceed it.
        overload: see `plan_copies`.
        max_copies: of one plan.
    """

    budget_bytes: float
    overload: float = 1.15
    max_copies: int = 64


class _CopyPlan:
    """Copies planned so far, and what they leave of room and budget."""

    def __init__(
        self,
        runs: Sequence[HotRun],
        held: Held,
        readers: Sequence[PoolMember],
        holders: Sequence[PoolMember],
        limits: CopyLimits,
    ) -> None:
        self.copies: list[PrefixCopy] = []
        self._runs = {run.name: run for run in runs}
        self._held = held
        self._readers = {member.worker_id: member for member in readers}
        self._holders = {member.worker_id: member for member in holders}
        self._room = {member.worker_id: member.report.room_blocks for member in readers}
        self._left = limits.budget_bytes
        self._planned: set[tuple[BlockHash, WorkerId]] = set()

    def is_reader(self, member: PoolMember) -> bool:
        """Whether a worker is among those that are compared."""
        return member.worker_id in self._readers

    def full_holders(self, run: HotRun) -> list[PoolMember]:
        """Members that hold all of a run's prefix."""
        full = (w for w, length in self._held[run.name].items() if length >= run.num_blocks)
        return [self._holders[worker] for worker in full if worker in self._holders]

    def missing(self, name: BlockHash, worker: WorkerId) -> int:
        """Blocks that a worker lacks when the copies planned so far are made."""
        run = self._runs[name]
        has = self._held[name].get(worker, 0)
        if run.parent is not None and (run.parent, worker) in self._planned:
            shared = min(run.num_blocks - run.own_blocks, self._runs[run.parent].num_blocks)
            has = max(has, shared)
        return run.num_blocks - has

    def fits(self, segment: Segment, worker: WorkerId) -> bool:
        """Whether a worker has room for a run's prefix."""
        return self.missing(segment.name, worker) <= self._room[worker]

    def add(self, name: BlockHash, target: WorkerId, reason: CopyReason) -> None:
        """Plans a copy from the least loaded holder that stays, if the bounds allow it."""
        sources = [m for m in self.full_holders(self._runs[name]) if m.worker_id != target]
        num_blocks = self.missing(name, target)
        if not sources or self._left <= 0 or not 0 < num_blocks <= self._room[target]:
            return
        # Who is leaving reads least, and may not lend any more: only if nobody else can.
        source = min(sources, key=lambda m: (m.report.leaving, m.read_blocks, m.worker_id))
        num_bytes = num_blocks * self._readers[target].report.block_bytes
        self._left -= num_bytes
        self._room[target] -= num_blocks
        self._planned.add((name, target))
        self.copies.append(
            PrefixCopy(name, source.worker_id, target, num_blocks, num_bytes, reason)
        )


def plan_prefix_copies(
    runs: Sequence[HotRun],
    held: Held,
    readers: Sequence[PoolMember],
    holders: Sequence[PoolMember],
    ordered: Collection[tuple[BlockHash, WorkerId]],
    limits: CopyLimits,
) -> list[PrefixCopy]:
    """Copies of hot prefixes: from workers about to leave that hold the last copy, and from
    overloaded workers to less loaded ones.

    Args:
        runs: most read first.
        readers: workers that do the same work: they are compared, and get copies.
        holders: workers that may be read from, `readers` among them; the least loaded is.
        ordered: runs and targets of copies on their way; they count as held.
    """
    plan = _CopyPlan(runs, held, readers, holders, limits)
    loads = {
        member.worker_id: member.read_blocks for member in readers if not member.report.leaving
    }
    hitters = [_as_segment(run, held[run.name], ordered) for run in runs]
    for run, segment in zip(runs, hitters, strict=True):
        last = plan.full_holders(run)
        if (
            any(plan.is_reader(member) for member in last)
            and all(member.report.leaving for member in last)
            and not any(worker in loads for worker in segment.copies)  # none is on its way
        ):
            free = [worker for worker in loads if plan.fits(segment, worker)]
            if free:
                target = min(free, key=lambda worker: (loads[worker], worker))
                plan.add(run.name, target, CopyReason.LEAVING_HOLDER)
    for copy in plan_copies(hitters, loads, limits.overload, limits.max_copies, plan.fits):
        plan.add(copy.segment, copy.target, copy.reason)
    return plan.copies


def _as_segment(
    run: HotRun,
    held: Mapping[WorkerId, int],
    ordered: Collection[tuple[BlockHash, WorkerId]],
) -> Segment:
    """A run as `plan_copies` reads it; what a read of it costs grows with its blocks."""
    copies = {worker: 0.0 for worker, length in held.items() if length >= run.num_blocks}
    copies.update({worker: 0.0 for name, worker in ordered if name == run.name})
    return Segment(run.name, None, run.reads * run.own_blocks, copies=copies)


def plan_hints(
    runs: Sequence[HotRun], held: Held, members: Sequence[PoolMember]
) -> dict[WorkerId, list[BlockHash]]:
    """Runs that each worker should evict first: all but one copy of each, leaves first.

    Args:
        runs: that are read no more; parents before children.
        members: the fullest ones give their copies up first; those about to leave do not count.
    """
    members = [member for member in members if not member.report.leaving]
    live = {member.worker_id for member in members}
    tree = SegmentTree()
    for run in runs:
        for worker, length in sorted(held[run.name].items()):
            if worker in live and length >= run.num_blocks:
                tree.add(run.name, tree.get(run.parent) if run.parent else None, worker, 0.0)
    hints: dict[WorkerId, list[BlockHash]] = {}
    for member in sorted(members, key=lambda each: (each.report.room_blocks, each.worker_id)):
        worker = member.worker_id
        last = {segment.name for segment in tree if len(segment.copies) == 1}
        for drop in plan_eviction(tree, worker, len(tree), last):
            segment = tree.get(drop.segment)
            assert segment is not None, "evicted twice"
            assert len(segment.copies) > 1, "the last copy of a segment is not given up by a hint"
            tree.drop(segment, drop.holder)
            hints.setdefault(worker, []).append(drop.segment)
    return hints


def reads_cv(members: Sequence[PoolMember]) -> float:
    """Coefficient of variation of what workers read of late; 0 without reads."""
    return coefficient_of_variation([member.read_blocks for member in members])
