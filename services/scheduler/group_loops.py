"""P/D-Serve's monitor over the live groups of one model: which role of which group is short.

P/D-Serve measures times at gateways. The scheduler counts requests by stage instead, which gives
the same means. Tests: tests/unit/scheduler/test_groups.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core.details import FleetWorker
from kvmesh.core.types import Role
from kvmesh.policy.groups import GroupKey, shares_of_groups
from kvmesh.policy.pdserve import RatioStep
from kvmesh.policy.ratio_monitor import RatioMonitor, StageCounts
from kvmesh.policy.waiting import Waiting, split_waiting
from services.scheduler.demand import Demand

Groups = Mapping[GroupKey, Sequence[FleetWorker]]


@dataclass(frozen=True, slots=True)
class GroupStep:
    """The monitor's result for one group."""

    group: GroupKey
    members: Sequence[FleetWorker]
    step: RatioStep


class GroupLoops:
    """One monitor per group."""

    def __init__(self) -> None:
        self._monitors: dict[GroupKey, RatioMonitor] = {}
        self._new: Counter[str] = Counter()

    def note_new(self, scenario: str) -> None:
        """Counts a request that was routed for the first time."""
        self._new[scenario] += 1

    def observe(self, workers: Sequence[FleetWorker], demand: Demand, elapsed_s: float) -> None:
        """Adds the loads of a cycle.

        Args:
            demand: requests that wait at the gateways.
        """
        groups = by_group(_movable(workers))
        new, self._new = self._new, Counter()
        arrived = shares_of_groups(new, sizes_of(groups))
        waiting = waiting_by_group(groups, demand)
        for key, members in groups.items():
            loads = [each.load for each in members]
            counts = StageCounts(
                waiting[key],
                sum(each.prefill_active - each.prefill_sending for each in loads),
                sum(
                    each.prefill_sending + each.decode_running + each.decode_preempted
                    for each in loads
                ),
            )
            monitor = self._monitors.setdefault(key, RatioMonitor())
            monitor.observe(counts, new.total() * arrived[key], elapsed_s)

    def end_window(self, workers: Sequence[FleetWorker]) -> Iterator[GroupStep]:
        """Yields the monitor's step for each group that had enough requests."""
        groups = by_group(_movable(workers))
        for key in self._monitors.keys() - groups.keys():
            del self._monitors[key]
        for key, members in sorted(groups.items()):
            monitor = self._monitors.get(key)
            num_prefill = sum(each.info.role is Role.PREFILL for each in members)
            if monitor is None:
                continue
            step = monitor.end_window(num_prefill, len(members) - num_prefill)
            if step is not None:
                yield GroupStep(key, members, step)

    def carried_out(self, group: GroupKey) -> None:
        """Notes that the group's last step was ordered."""
        self._monitors[group].carried_out()


def by_group(workers: Iterable[FleetWorker]) -> dict[GroupKey, list[FleetWorker]]:
    """Workers by their group."""
    # By plain tuples first: making and hashing a key for each of thousands takes milliseconds.
    groups: dict[tuple[str, str, str, str], list[FleetWorker]] = {}
    for worker in workers:
        info = worker.info
        name = (info.model, info.layout.model_fingerprint, info.scenario, info.cluster)
        members = groups.get(name)
        if members is None:
            members = groups[name] = []
        members.append(worker)
    return {GroupKey.of(members[0].info): members for members in groups.values()}


def sizes_of(groups: Groups) -> dict[GroupKey, int]:
    """Number of workers of each group."""
    return {key: len(members) for key, members in groups.items()}


def waiting_by_group(groups: Groups, demand: Demand) -> dict[GroupKey, Waiting]:
    """Number of waiting requests of each group, by the side for which they wait."""
    sizes = sizes_of(groups)
    reserved, unreserved = dict.fromkeys(sizes, 0.0), dict.fromkeys(sizes, 0.0)
    for scenario, looking in demand.scenarios.items():
        for key, share in shares_of_groups({scenario: 1}, sizes).items():
            reserved[key] += looking.reserved * share
            unreserved[key] += looking.unreserved * share
    return {
        key: split_waiting(reserved[key], unreserved[key], [each.load for each in members])
        for key, members in groups.items()
    }


def _movable(workers: Iterable[FleetWorker]) -> Iterator[FleetWorker]:
    return (each for each in workers if each.info.role is not Role.HYBRID)
