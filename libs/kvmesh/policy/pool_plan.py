"""The kvmanager's plans for the pool of the workers' caches.

It orders copies of hot prefixes to less loaded workers, away from leaving ones, to clusters that
have none and, where prefixes are placed by hash, to the workers that their hashes name. It hints
which copies of cold prefixes to evict first. A worker can use a block only with all blocks before
it, so a copy is a whole prefix without the part that the target holds. `plan_copies` and
`plan_eviction` decide over runs (`hot_runs.py`) as they do over segments in the simulator.
Source: TokenLake 4.3, 4.4. Tests: tests/unit/policy/test_pool_plan.py.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core.pool import PoolMember
from kvmesh.core.summary_statistics import coefficient_of_variation
from kvmesh.core.types import BlockHash, Role, WorkerId
from kvmesh.policy.hot_runs import Held, HotRun
from kvmesh.policy.pool_eviction import plan_eviction
from kvmesh.policy.replication import CopyReason, plan_copies
from kvmesh.policy.segment_tree import Segment, SegmentTree
from kvmesh.policy.segments import home


class PoolPlacement(enum.Enum):
    """Where a prefix that is read lies besides the workers that computed it."""

    LOCAL = "local"
    HASHED = "hashed"
    """Also on its home, the worker that its hash names (TokenLake 4.3)."""


@dataclass(frozen=True, slots=True)
class PrefixCopy:
    """A prefix to copy.

    Attributes:
        run: name of the run at its end.
        num_blocks: blocks that the target lacks.
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
        budget_bytes: copies are planned while less than this is spent; the last one may exceed it.
        overload: see `plan_copies`.
        max_copies: maximum number of copies of overloaded workers' prefixes in one plan.
        placement: whether prefixes are copied to their homes.
    """

    budget_bytes: float
    overload: float = 1.15
    max_copies: int = 64
    placement: PoolPlacement = PoolPlacement.LOCAL


class _CopyPlan:
    """Copies planned so far, and the room and budget left after them."""

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
        """Whether a worker's load is compared with the others'."""
        return member.worker_id in self._readers

    def full_holders(self, run: HotRun) -> list[PoolMember]:
        """Returns the members that hold all of a run's prefix."""
        full = (w for w, length in self._held[run.name].items() if length >= run.num_blocks)
        return [self._holders[worker] for worker in full if worker in self._holders]

    def missing(self, name: BlockHash, worker: WorkerId) -> int:
        """Returns the blocks of a run's prefix that a worker lacks after the copies planned so
        far.
        """
        run = self._runs[name]
        has = self._held[name].get(worker, 0)
        if run.parent is not None and (run.parent, worker) in self._planned:
            shared = min(run.num_blocks - run.own_blocks, self._runs[run.parent].num_blocks)
            has = max(has, shared)
        return run.num_blocks - has

    def fits(self, segment: Segment, worker: WorkerId) -> bool:
        """Whether a worker has room for a run's prefix."""
        return self.missing(segment.name, worker) <= self._room[worker]

    def add(self, name: BlockHash, target: WorkerId, reason: CopyReason) -> bool:
        """Plans a copy from the least loaded holder that stays, if the bounds allow it."""
        sources = [m for m in self.full_holders(self._runs[name]) if m.worker_id != target]
        num_blocks = self.missing(name, target)
        if not sources or self._left <= 0 or not 0 < num_blocks <= self._room[target]:
            return False
        # A leaving worker reads least, but may stop lending: it is the source only if no other can.
        source = min(sources, key=lambda m: (m.report.leaving, m.read_blocks, m.worker_id))
        num_bytes = num_blocks * self._readers[target].report.block_bytes
        self._left -= num_bytes
        self._room[target] -= num_blocks
        self._planned.add((name, target))
        self.copies.append(
            PrefixCopy(name, source.worker_id, target, num_blocks, num_bytes, reason)
        )
        return True


def plan_prefix_copies(
    runs: Sequence[HotRun],
    held: Held,
    readers: Sequence[PoolMember],
    holders: Sequence[PoolMember],
    ordered: Collection[tuple[BlockHash, WorkerId]],
    limits: CopyLimits,
) -> list[PrefixCopy]:
    """Plans copies of hot prefixes (TokenLake 4.3).

    Prefixes whose last copies lie on leaving workers are copied first, then prefixes that are not
    on their homes, then those of overloaded workers to less loaded ones.

    Args:
        runs: most read first.
        held: blocks of each run's prefix that each worker holds.
        readers: workers that do the same work: their loads are compared, and they get copies.
        holders: workers that may be read from, including `readers`; the least loaded is the source.
        ordered: runs and targets of copies in flight; they count as held.
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
            and not any(worker in loads for worker in segment.copies)  # no copy is in flight
        ):
            free = [worker for worker in loads if plan.fits(segment, worker)]
            if free:
                target = min(free, key=lambda worker: (loads[worker], worker))
                plan.add(run.name, target, CopyReason.LEAVING_HOLDER)
    if limits.placement is PoolPlacement.HASHED:
        _plan_homes(plan, hitters, sorted(loads))
    for copy in plan_copies(hitters, loads, limits.overload, limits.max_copies, plan.fits):
        plan.add(copy.segment, copy.target, copy.reason)
    return plan.copies


def plan_cluster_copies(
    runs: Sequence[HotRun],
    held: Held,
    members: Sequence[PoolMember],
    ordered: Collection[tuple[BlockHash, WorkerId]],
    budget_bytes: float,
) -> list[PrefixCopy]:
    """Plans copies of hot prefixes to clusters in which no worker holds them (PrfaaS 3.2).

    A cluster without workers that compute prompts needs none. The target is the worker that reads
    least there; the source may be in any other cluster.

    Args:
        runs, held, members, ordered: as in `plan_prefix_copies`, of all clusters.
        budget_bytes: copies are planned while less than this is spent; the last may exceed it.
    """
    copies: list[PrefixCopy] = []
    clusters: dict[str, list[PoolMember]] = {}
    for member in members:
        clusters.setdefault(member.cluster, []).append(member)
    for _, near in sorted(clusters.items() if len(clusters) > 1 else ()):
        readers = [
            member
            for member in near
            if member.report.role is not Role.DECODE and not member.report.leaving
        ]
        spent = sum(copy.num_bytes for copy in copies)
        plan = _CopyPlan(runs, held, readers, members, CopyLimits(budget_bytes - spent))
        for run in runs:
            segment = _as_segment(run, held[run.name], ordered)
            free = [member for member in readers if plan.fits(segment, member.worker_id)]
            if free and not any(member.worker_id in segment.copies for member in near):
                target = min(free, key=lambda member: (member.read_blocks, member.worker_id))
                plan.add(run.name, target.worker_id, CopyReason.OTHER_CLUSTER)
        copies += plan.copies
    return copies


def _plan_homes(plan: _CopyPlan, runs: Sequence[Segment], workers: Sequence[WorkerId]) -> None:
    """Plans copies of runs to the workers that their hashes name.

    A worker that joins or leaves moves the homes behind it in the order of names; the prefixes
    there stay readable where they are.
    """
    for run in runs if workers else ():
        target = workers[home(run.name, len(workers))]
        if target not in run.copies and plan.add(run.name, target, CopyReason.HASHED_HOME):
            run.copies[target] = 0.0


def _as_segment(
    run: HotRun,
    held: Mapping[WorkerId, int],
    ordered: Collection[tuple[BlockHash, WorkerId]],
) -> Segment:
    """Returns a run in the form that `plan_copies` takes; its reads are weighted by its blocks."""
    copies = {worker: 0.0 for worker, length in held.items() if length >= run.num_blocks}
    copies.update({worker: 0.0 for name, worker in ordered if name == run.name})
    return Segment(run.name, None, run.reads * run.own_blocks, copies=copies)


def plan_hints(
    runs: Sequence[HotRun], held: Held, members: Sequence[PoolMember]
) -> dict[WorkerId, list[BlockHash]]:
    """Returns the runs that each worker should evict first: all but one copy of each, leaves first.

    Args:
        runs: runs that are no longer read; parents before children.
        members: fuller ones give up their copies first; leaving ones do not count.
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
    """Returns the coefficient of variation of the workers' recent reads; 0 without reads."""
    return coefficient_of_variation([member.read_blocks for member in members])
