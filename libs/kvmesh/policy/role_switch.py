"""FlowKV's answer to uneven load: idle workers of one side help the other for some cycles. If the
load stays too high or too low for the fleet, a signal asks for another size.

Source: FlowKV 3.4 and Algorithm 1. The paper leaves open which idle side helps, for how long, when
help ends, whether a move must pay, and help in the extreme regime; these rules are ours.
Tests: tests/unit/policy/test_role_switch.py.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core.types import Role, WorkerId
from kvmesh.policy.load_score import Regime, Score, ScoredWorker


class SwitchReason(enum.Enum):
    """Why a worker changes its side."""

    HELPS_PREFILL = "idle, and prefill is above its capacity"
    HELPS_DECODE = "idle, and decode is above its capacity"
    NO_LONGER_NEEDED = "the side it helped is within its capacity"
    NEEDED_AT_HOME = "its own side is above its capacity"
    CYCLES_OVER = "it helped for its turn, and the side it helped can do without"


@dataclass(frozen=True, slots=True)
class Help:
    """A worker that works for the other side.

    Attributes:
        role: the side that it helps.
        cycles_left: cycles left of its turn. Negative while it stays on, because the side would ask
            for help again at once.
    """

    role: Role
    cycles_left: int


@dataclass(frozen=True, slots=True)
class Switch:
    """An order to a worker to change its side.

    Attributes:
        role: prefill or decode; the side that it gives priority to from now on.
        cycles: number of cycles. 0 is the paper's terminate signal: it returns to its own side.
    """

    worker_id: WorkerId
    role: Role
    cycles: int
    reason: SwitchReason


@dataclass(frozen=True, slots=True)
class SwitchLimits:
    """Bounds for role switches.

    After a move the giving side must be less loaded than the receiving side by `margin`: otherwise
    the next cycle would want the worker back. Where both sides are full no move fulfils that, so no
    worker moves.

    Attributes:
        idle: score of its own side below which a worker is idle.
        needy: mean score above which a side asks for help.
        settled: mean score below which a helped side needs no more help; less than `needy`, so that
            help does not flap.
        cycles: length of one turn in cycles.
        min_cycles: minimum cycles before a helper returns: the effect of a move shows only after
            the score window.
        rest_cycles: cycles after a return in which no worker begins to help that side again. It
            doubles with each further cycle in a row in which helpers were called back. The other
            side is helped at once: if the load has moved there, the returned workers may not be
            enough.
        max_rest_cycles: maximum of `rest_cycles` after doubling.
        max_share: maximum fraction of a side that helps at once.
        margin: difference of scores that pays for a move's cost: new routes, and prefixes that lie
            on the wrong side.
    """

    idle: float = 0.35
    needy: float = 0.7
    settled: float = 0.5
    cycles: int = 20
    min_cycles: int = 5
    rest_cycles: int = 5
    max_rest_cycles: int = 160
    max_share: float = 0.67
    margin: float = 0.1


@dataclass(frozen=True, slots=True)
class _Side:
    """Number of workers of one side and their mean score; a move spreads the same work anew."""

    num: int
    mean: float

    def without_one(self) -> _Side:
        left = self.num - 1
        return _Side(left, self.mean * self.num / left if left else math.inf)

    def with_one(self) -> _Side:
        return _Side(self.num + 1, self.mean * self.num / (self.num + 1))


def plan_switches(
    workers: Sequence[ScoredWorker],
    fleet: Score,
    regime: Regime,
    helping: Mapping[WorkerId, Help],
    limits: SwitchLimits | None = None,
    *,
    resting: Collection[Role] = (),
) -> list[Switch]:
    """Returns the switches of this cycle (FlowKV Algorithm 1, imbalanced and extreme states).

    In the extreme regime the fleet has the wrong size. Changing it takes minutes, if it is possible
    at all, so until then idle workers help as in the imbalanced regime.

    Args:
        workers: all live workers, with the side that they work for now.
        helping: the helpers, with their cycles left before this one.
        resting: sides that no worker may begin to help now.
    """
    limits = limits or SwitchLimits()
    num_prefill = sum(worker.prefills for worker in workers)
    sides = {
        Role.PREFILL: _Side(num_prefill, fleet.prefill),
        Role.DECODE: _Side(len(workers) - num_prefill, fleet.decode),
    }
    ends = _ends(workers, sides, helping, limits)
    if ends or regime is Regime.NORMAL:
        return ends
    role = needier(fleet)
    return [] if role in resting else _starts(role, workers, sides, helping, limits)


def other(role: Role) -> Role:
    """Returns the other side."""
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def needier(fleet: Score) -> Role:
    """Returns the more loaded side."""
    return Role.PREFILL if fleet.prefill >= fleet.decode else Role.DECODE


def _balances(giver: _Side, taker: _Side, limits: SwitchLimits) -> bool:
    """Whether moving one worker evens the sides out without reversing the imbalance."""
    return giver.without_one().mean + limits.margin <= taker.with_one().mean


def _ends(
    workers: Sequence[ScoredWorker],
    sides: dict[Role, _Side],
    helping: Mapping[WorkerId, Help],
    limits: SwitchLimits,
) -> list[Switch]:
    switches: list[Switch] = []
    sides = dict(sides)
    for worker in workers:
        help_ = helping.get(worker.worker_id)
        if help_ is None or limits.cycles - help_.cycles_left < limits.min_cycles:
            continue
        own = other(help_.role)
        reason = _why_end(help_, sides[help_.role], sides[own], limits)
        if reason is None:
            continue
        # Each return counts for the next decision, so that not all return where one is enough.
        sides[help_.role] = sides[help_.role].without_one()
        sides[own] = sides[own].with_one()
        switches.append(Switch(worker.worker_id, own, 0, reason))
    return switches


def _why_end(help_: Help, helped: _Side, home: _Side, limits: SwitchLimits) -> SwitchReason | None:
    if home.mean > limits.needy and _balances(helped, home, limits):
        return SwitchReason.NEEDED_AT_HOME
    if helped.without_one().mean > limits.needy:
        return None  # the side would ask for help again
    if helped.mean < limits.settled:
        return SwitchReason.NO_LONGER_NEEDED
    return SwitchReason.CYCLES_OVER if help_.cycles_left <= 0 else None


def _starts(
    role: Role,
    workers: Sequence[ScoredWorker],
    sides: dict[Role, _Side],
    helping: Mapping[WorkerId, Help],
    limits: SwitchLimits,
) -> list[Switch]:
    helped, home = sides[role], sides[other(role)]
    # Helpers return before workers start to help in the other direction.
    if helped.mean <= limits.needy or any(help_.role is not role for help_ in helping.values()):
        return []
    to_prefill = role is Role.PREFILL
    side = [worker for worker in workers if worker.prefills is not to_prefill]
    num_away = len(helping)
    room = int((len(side) + num_away) * limits.max_share) - num_away
    idle = sorted(
        (worker.own_score, worker.worker_id)
        for worker in side
        if worker.own_score < limits.idle and worker.worker_id not in helping
    )
    reason = SwitchReason.HELPS_PREFILL if to_prefill else SwitchReason.HELPS_DECODE
    switches: list[Switch] = []
    for _, name in idle[: max(room, 0)]:
        if not _balances(home, helped, limits) or home.without_one().mean > limits.needy:
            break
        home, helped = home.without_one(), helped.with_one()
        switches.append(Switch(name, role, limits.cycles, reason))
    return switches


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
        low: score below which, on both sides, load is low.
        hold_s: seconds that the load must stay beyond a threshold.
    """

    low: float = 0.15
    hold_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ScaleSignal:
    """A wanted change of the fleet's size (FlowKV Algorithm 1, extreme state).

    Attributes:
        step: number of workers to add; negative to remove.
        role: the side to change; None while the load fits.
        is_low: whether the load is below the lower threshold rather than above the upper.
        since: time since which the load is beyond a threshold; None while it fits. The next call
            reads it from the signal that it gets.
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
    """Asks for one worker more or less, on the side that needs it most, after lasting extreme load.

    Args:
        before: the last signal; `STEADY` at first.
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
    # The hold time starts again, so that the fleet changes by one worker per hold time.
    return ScaleSignal(wanted, role, is_low, now, reason)
