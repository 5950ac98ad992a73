"""The size that a horizontal autoscaler of Kubernetes would give a group, as a scale signal.

It follows the mean use of slots, as the chart's autoscalers do by the metrics
`kvmesh_prefill_slots_used` and `kvmesh_decode_sequences`.
Source: Kubernetes' HorizontalPodAutoscaler: the wanted number is the number of pods times use over
target, rounded up, without a change within a tolerance. One worker per hold time, as the chart
bounds its autoscalers. Tests: tests/unit/policy/test_slot_use.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvmesh.core.details import FleetWorker
from kvmesh.core.summary_statistics import mean
from kvmesh.core.types import Role
from kvmesh.policy.role_switch import STEADY, ScaleReason, ScaleSignal


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """When the number of workers follows the use of their slots.

    Attributes:
        targets: wanted mean share of slots in use, by role. Those of the chart: 0.7 prompts for a
            slot, and 24 sequences for 32 slots.
        tolerance: relative difference from the target that changes nothing.
        grow_s: seconds for which more workers must be wanted.
        shrink_s: seconds for which fewer must be wanted.
    """

    targets: Mapping[Role, float] = field(
        default_factory=lambda: {Role.PREFILL: 0.7, Role.DECODE: 0.75}
    )
    tolerance: float = 0.1
    grow_s: float = 30.0
    shrink_s: float = 300.0


@dataclass(frozen=True, slots=True)
class SideUse:
    """The workers of one role, and the mean share of their slots that is in use."""

    num: int
    share: float


def slot_use(workers: Iterable[FleetWorker]) -> dict[Role, SideUse]:
    """Returns the use of slots by role; roles without workers are left out."""
    shares: dict[Role, list[float]] = {Role.PREFILL: [], Role.DECODE: []}
    for each in workers:
        info, load = each.info, each.load
        if info.role is Role.PREFILL:
            shares[info.role].append(load.prefill_active / max(info.prefill_slots, 1))
        elif info.role is Role.DECODE:
            shares[info.role].append(load.decode_running / max(info.decode_slots, 1))
    return {role: SideUse(len(each), mean(each)) for role, each in shares.items() if each}


class SlotMeter:
    """The use of a group's slots, averaged over a window as autoscalers' metrics are.

    Requests that end together empty many slots for a moment, which must not end a signal.
    """

    def __init__(self, window_s: float = 30.0) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, dict[Role, SideUse]]] = deque()

    def observe(self, workers: Iterable[FleetWorker], now: float) -> dict[Role, SideUse]:
        """Adds a reading; returns the numbers of workers now, and their mean shares."""
        use = slot_use(workers)
        self._seen.append((now, use))
        while self._seen[0][0] < now - self._window_s:
            self._seen.popleft()
        return {
            role: SideUse(each.num, mean([u[role].share for _, u in self._seen if role in u]))
            for role, each in use.items()
        }


def slot_signal(
    use: Mapping[Role, SideUse], before: ScaleSignal, now: float, limits: SlotLimits | None = None
) -> ScaleSignal:
    """Asks for one worker more or less of the role that is furthest from its target.

    Args:
        before: the last signal; `STEADY` at first.
    """
    limits = limits or SlotLimits()
    ratios = {role: each.share / limits.targets[role] for role, each in use.items()}
    wanted = {role: max(math.ceil(use[role].num * ratio), 1) for role, ratio in ratios.items()}
    too_few = [role for role, ratio in ratios.items() if ratio > 1 + limits.tolerance]
    too_many = [
        role
        for role, ratio in ratios.items()
        if ratio < 1 - limits.tolerance and wanted[role] < use[role].num
    ]
    if too_few:
        role, is_low, hold_s = max(too_few, key=ratios.__getitem__), False, limits.grow_s
    elif too_many:
        role, is_low, hold_s = min(too_many, key=ratios.__getitem__), True, limits.shrink_s
    else:
        return STEADY
    if before.since is None or before.role is not role or before.is_low is not is_low:
        return ScaleSignal(0, role, is_low, now, ScaleReason.WAITING)
    if now - before.since < hold_s:
        return ScaleSignal(0, role, is_low, before.since, ScaleReason.WAITING)
    reason = ScaleReason.LOW_LOAD if is_low else ScaleReason.OVERLOAD
    return ScaleSignal(-1 if is_low else 1, role, is_low, now, reason)
