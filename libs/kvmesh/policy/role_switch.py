"""FlowKV's answer to uneven load: idle workers of one side help the other for some cycles, and when
the load of the fleet stays beyond its size, a signal to change the size.

Source: FlowKV 3.4 and Algorithm 1. Which idle side helps, how long, when help ends, and help in the
extreme regime are ours, the paper leaves them open. Tests: tests/unit/policy/test_role_switch.py.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core.types import Role, WorkerId
from kvmesh.policy.load_score import Regime, Score, ScoredWorker


class SwitchReason(enum.Enum):
    """Why a worker changes its side."""

    HELPS_PREFILL = "idle, and prefill is above its capacity"
    HELPS_DECODE = "idle, and decode is above its capacity"
    NO_LONGER_NEEDED = "the side it helped is within its capacity"
    NEEDED_AT_HOME = "its own side is above its capacity"
    CYCLES_OVER = "it helped for as long as it was told to"


@dataclass(frozen=True, slots=True)
class Help:
    """A worker that works for the other side.

    Attributes:
        cycles_left: after these it returns, unless told before (terminate signal).
    """

    role: Role
    cycles_left: int


@dataclass(frozen=True, slots=True)
class Switch:
    """A worker to tell.

    Attributes:
        role: prefill or decode; what it gives priority to from now on.
        cycles: how long; 0 is the terminate signal, it returns to the role it had.
    """

    worker_id: WorkerId
    role: Role
    cycles: int
    reason: SwitchReason


@dataclass(frozen=True, slots=True)
class SwitchLimits:
    """When workers help.

    Attributes:
        idle: a worker with a lower score of its own side is idle.
        needy: a side with a higher mean asks for help.
        settled: a helped side with a lower mean needs it no more; below `needy`, so that help does
            not flap.
        cycles: length of one turn.
        max_share: at most this share of a side helps at once.
    """

    idle: float = 0.35
    needy: float = 0.7
    settled: float = 0.5
    cycles: int = 20
    max_share: float = 0.5


def plan_switches(
    workers: Sequence[ScoredWorker],
    fleet: Score,
    regime: Regime,
    helping: Mapping[WorkerId, Help],
    limits: SwitchLimits | None = None,
) -> list[Switch]:
    """The workers to tell in this cycle.

    In the extreme regime the fleet's size is wrong; until it is another, which takes minutes if it
    can be had at all, idle workers help just as in the imbalanced one.

    Args:
        workers: all live ones, with the side they work for now.
        helping: who helps, with the cycles that are left before this one.
    """
    limits = limits or SwitchLimits()
    ends = _ends(workers, fleet, helping, limits)
    if ends or regime is Regime.NORMAL:
        return ends
    return _starts(workers, fleet, helping, limits)


def _ends(
    workers: Sequence[ScoredWorker],
    fleet: Score,
    helping: Mapping[WorkerId, Help],
    limits: SwitchLimits,
) -> list[Switch]:
    switches: list[Switch] = []
    for worker in workers:
        help_ = helping.get(worker.worker_id)
        if help_ is None:
            continue
        to_prefill = help_.role is Role.PREFILL
        helped, home = (
            (fleet.prefill, fleet.decode) if to_prefill else (fleet.decode, fleet.prefill)
        )
        if home > limits.needy and home > helped:
            reason = SwitchReason.NEEDED_AT_HOME
        elif helped < limits.settled:
            reason = SwitchReason.NO_LONGER_NEEDED
        elif help_.cycles_left <= 0:
            reason = SwitchReason.CYCLES_OVER
        else:
            continue
        own = Role.DECODE if to_prefill else Role.PREFILL
        switches.append(Switch(worker.worker_id, own, 0, reason))
    return switches


def _starts(
    workers: Sequence[ScoredWorker],
    fleet: Score,
    helping: Mapping[WorkerId, Help],
    limits: SwitchLimits,
) -> list[Switch]:
    to_prefill = fleet.prefill >= fleet.decode
    if max(fleet.prefill, fleet.decode) <= limits.needy:
        return []
    side = [worker for worker in workers if worker.prefills is not to_prefill]
    num_away = sum((help_.role is Role.PREFILL) is to_prefill for help_ in helping.values())
    room = int((len(side) + num_away) * limits.max_share) - num_away
    idle = sorted(
        (worker.own_score, worker.worker_id)
        for worker in side
        if worker.own_score < limits.idle and worker.worker_id not in helping
    )
    role = Role.PREFILL if to_prefill else Role.DECODE
    reason = SwitchReason.HELPS_PREFILL if to_prefill else SwitchReason.HELPS_DECODE
    return [Switch(name, role, limits.cycles, reason) for _, name in idle[: max(room, 0)]]


# --- scaling -------------------------------------------------------------------------------------


class ScaleReason(enum.Enum):
    """Why the fleet should grow or shrink, or not."""

    FITS = "the load fits the fleet"
    WAITING = "beyond the threshold, not yet for long enough"
    OVERLOAD = "above the threshold for the set time"
    LOW_LOAD = "below the threshold for the set time"


@dataclass(frozen=True, slots=True)
class ScaleLimits:
    """When the fleet's size should change.

    Attributes:
        low: both sides below this is low load.
        hold_s: how long the load must stay beyond a threshold.
    """

    low: float = 0.15
    hold_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ScaleSignal:
    """What to do, and since when the load has been beyond a threshold.

    Attributes:
        step: workers to add, negative to remove.
        role: which side.
        is_low: whether the load is below the lower threshold rather than above the upper.
        since: pass the signal to the next call; None while the load fits.
    """

    step: int
    role: Role | None
    is_low: bool
    since: float | None
    reason: ScaleReason


STEADY = ScaleSignal(0, None, False, None, ScaleReason.FITS)


def scale_signal(
    fleet: Score, regime: Regime, before: ScaleSignal, now: float, limits: ScaleLimits | None = None
) -> ScaleSignal:
    """One worker more or less on the side that needs it most, once the load has stayed extreme.

    Args:
        before: the last signal, `STEADY` at first.
    """
    limits = limits or ScaleLimits()
    is_low = max(fleet.prefill, fleet.decode) < limits.low
    if regime is not Regime.EXTREME and not is_low:
        return STEADY
    wanted = -1 if is_low else 1
    larger_is_prefill = fleet.prefill >= fleet.decode
    role = Role.PREFILL if larger_is_prefill is not is_low else Role.DECODE
    if before.since is None or before.role is not role or before.is_low is not is_low:
        return ScaleSignal(0, role, is_low, now, ScaleReason.WAITING)
    if now - before.since < limits.hold_s:
        return ScaleSignal(0, role, is_low, before.since, ScaleReason.WAITING)
    reason = ScaleReason.LOW_LOAD if is_low else ScaleReason.OVERLOAD
    # The time starts again, so that the fleet changes by one worker per hold time.
    return ScaleSignal(wanted, role, is_low, now, reason)
