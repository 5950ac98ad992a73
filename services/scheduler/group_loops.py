"""P/D-Serve's monitor over the live groups of one model: which role of which group is short.

Gateways measure times; the scheduler counts who is where, which says the same of the mean.
Tests: tests/unit/scheduler/test_groups.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvmesh.core.details import FleetWorker
from kvmesh.core.types import Role
from kvmesh.policy.pdserve import RatioStep
from kvmesh.policy.ratio_monitor import RatioMonitor, StageCounts
from kvmesh.policy.waiting import Waiting


@dataclass(frozen=True, slots=True)
class GroupStep:
    """What the monitor says of one group."""

    scenario: str
    members: list[FleetWorker]
    step: RatioStep


class GroupLoops:
    """One monitor for each scenario that workers are labelled with; "" is all the rest."""

    def __init__(self) -> None:
        self._monitors: dict[str, RatioMonitor] = {}
        self._new: Counter[str] = Counter()
        self._arrived: Counter[str] = Counter()

    def note_new(self, scenario: str) -> None:
        """A request was routed for the first time."""
        self._new[scenario] += 1

    def observe(self, workers: Sequence[FleetWorker], waiting: Waiting, elapsed_s: float) -> None:
        """Takes the loads of a cycle.

        Args:
            waiting: requests at the gateways; they count for groups as their arrivals are shared,
                for all alike where none came.
        """
        groups = _groups(workers)
        arrived: Counter[str] = Counter()
        for scenario, count in self._new.items():
            arrived[scenario if scenario in groups else ""] += count
        self._new.clear()
        self._arrived += arrived
        total = self._arrived.total()
        for name, members in groups.items():
            loads = [each.load for each in members]
            # Who waits may have come in a window before, and nobody in this one yet.
            share = self._arrived[name] / total if total else 1.0 / len(groups)
            counts = StageCounts(
                Waiting(waiting.prefill * share, waiting.decode * share),
                sum(each.prefill_active - each.prefill_sending for each in loads),
                sum(
                    each.prefill_sending + each.decode_running + each.decode_preempted
                    for each in loads
                ),
            )
            monitor = self._monitors.setdefault(name, RatioMonitor())
            monitor.observe(counts, arrived[name], elapsed_s)

    def end_window(self, workers: Sequence[FleetWorker]) -> Iterator[GroupStep]:
        """What the rule says of each group that had enough requests."""
        groups = _groups(workers)
        self._arrived.clear()
        for name in self._monitors.keys() - groups.keys():
            del self._monitors[name]
        for name, members in sorted(groups.items()):
            monitor = self._monitors.get(name)
            num_prefill = sum(each.info.role is Role.PREFILL for each in members)
            if monitor is None:
                continue
            step = monitor.end_window(num_prefill, len(members) - num_prefill)
            if step is not None:
                yield GroupStep(name, members, step)

    def carried_out(self, scenario: str) -> None:
        """The group's last step was ordered."""
        self._monitors[scenario].carried_out()


def _groups(workers: Iterable[FleetWorker]) -> dict[str, list[FleetWorker]]:
    groups: dict[str, list[FleetWorker]] = {}
    for worker in workers:
        if worker.info.role is not Role.HYBRID:
            groups.setdefault(worker.info.scenario, []).append(worker)
    return groups
