"""Roles every second, for the scheduler and the simulator alike: FlowKV's load scores, and who
helps the other side.

The loop keeps what it has seen and decides; whoever owns it measures, waits and carries out.
Source: FlowKV Algorithm 1. Tests: tests/unit/policy/test_role_loop.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core.turns import WORKERS_IN_A_TURN, Parts
from kvmesh.core.types import Role, WorkerId, WorkerInfo, WorkerLoad
from kvmesh.policy.load_score import (
    Capacity,
    LoadState,
    Queues,
    Regime,
    Score,
    ScoredWorker,
    ScoreWindow,
    classify,
    fleet_score,
    score,
)
from kvmesh.policy.role_switch import Help, Switch, SwitchLimits, SwitchReason, other, plan_switches
from kvmesh.policy.token_pace import context_share, time_used
from kvmesh.policy.waiting import Waiting

CYCLE_S = 1.0
"""Fast scale: threshold and role switches."""

SCORE_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """A worker as the role loop sees it in one cycle."""

    worker_id: WorkerId
    role: Role
    state: LoadState
    capacity: Capacity


def room_used(info: WorkerInfo, load: WorkerLoad) -> float:
    """Share of the room for sequences: of blocks, and where they decode of slots, whichever is
    scarcer, or of the time per token that they accept. A decode worker without a free slot is
    full, however short its sequences are.
    """
    blocks = 1.0 - load.blocks_free / max(info.num_blocks, 1)
    if info.role is Role.PREFILL:
        return blocks
    slots = load.decode_running / max(info.decode_slots, 1)
    return max(blocks, slots, min(time_used(load.room), 1.0))


def decode_slots(info: WorkerInfo, load: WorkerLoad) -> float:
    """Sequences like those that decode there now that a worker takes: its slots, or fewer where
    their limits on the time per token leave no time for so many.
    """
    running, share = load.decode_running, context_share(load.room)
    return min(info.decode_slots, max(running / share, 1.0)) if share else info.decode_slots


def read_worker(info: WorkerInfo, load: WorkerLoad, waiting: Waiting) -> WorkerReading:
    """The twelve indicators of a worker that reports its load.

    Args:
        waiting: for this worker: its even share of what waits at the gateways for its side.
    """
    prefills = info.role is Role.PREFILL
    slots = decode_slots(info, load)
    slots_used = load.decode_running / max(slots, 1)
    state = LoadState(
        prefill=Queues(
            running=max(load.prefill_active - load.prefill_sending, 0),
            waiting=waiting.prefill if prefills else 0.0,
            sending=load.prefill_sending,
        ),
        decode=Queues(
            running=load.decode_running,
            waiting=0.0 if prefills else waiting.decode,
            swapped=load.decode_preempted,
            sending=load.decode_reserved,
        ),
        # A step is bounded by its tokens and by its sequences; decode steps reach the latter.
        budget_used=max(load.budget_used, slots_used),
        blocks_used=room_used(info, load),
        compute_used=load.compute_used,
        memory_bandwidth_used=load.memory_bandwidth_used,
    )
    capacity = Capacity(info.prefill_slots, slots)
    return WorkerReading(info.worker_id, info.role, state, capacity)


@dataclass(frozen=True, slots=True)
class RoleCycle:
    """What one cycle found and wants."""

    regime: Regime
    fleet: Score
    switches: tuple[Switch, ...]


class _Rest:
    """How long nobody begins to help a side.

    Where help was a mistake it would be one again: each one doubles the time to the next. All whom
    their side calls in one cycle are one mistake, whoever else returns in it.

    Attributes:
        cycles_left: 0 while the side may be helped.
    """

    def __init__(self, limits: SwitchLimits) -> None:
        self._limits = limits
        self.cycles_left = 0
        self._next = self._last = limits.rest_cycles
        self._was_called = False

    def cycle(self) -> None:
        """A cycle begins."""
        self.cycles_left = max(self.cycles_left - 1, 0)
        self._last, self._was_called = self._next, False

    def begin(self, why: SwitchReason) -> None:
        """A helper returned."""
        if why is SwitchReason.NEEDED_AT_HOME:
            self._next = min(2 * self._last, self._limits.max_rest_cycles)
            self._was_called = True
        elif not self._was_called:
            self._next = self._limits.rest_cycles
        self.cycles_left = self._next


class RoleLoop:
    """FlowKV's controller: scores over a window, a regime, and who helps the other side."""

    def __init__(self) -> None:
        self._limits = SwitchLimits()
        self._windows: dict[WorkerId, ScoreWindow] = {}
        self._helping: dict[WorkerId, Help] = {}
        self._rests = {role: _Rest(self._limits) for role in (Role.PREFILL, Role.DECODE)}

    @property
    def is_helping(self) -> bool:
        """Whether a worker is away from its own side."""
        return bool(self._helping)

    def cycle(self, readings: Sequence[WorkerReading], now: float) -> Parts[RoleCycle]:
        """Decides for one cycle.

        Args:
            readings: of all live workers that prefill or decode, hybrids left out.
        """
        roles = {each.worker_id: each.role for each in readings}
        for name in self._windows.keys() - roles.keys():
            del self._windows[name]
        # Who is gone, or was told otherwise by somebody else, helps no more.
        self._helping = {
            name: Help(help_.role, help_.cycles_left - 1)
            for name, help_ in self._helping.items()
            if roles.get(name) is help_.role
        }
        for rest in self._rests.values():
            rest.cycle()
        scored: list[ScoredWorker] = []
        for each in readings:
            scored.append(self._score(each, now))
            if len(scored) % WORKERS_IN_A_TURN == 0:
                yield
        fleet = fleet_score(scored)
        regime = classify(fleet)
        resting = [role for role, rest in self._rests.items() if rest.cycles_left]
        switches = plan_switches(
            scored, fleet, regime, self._helping, self._limits, resting=resting
        )
        return RoleCycle(regime, fleet, tuple(switches))

    def carried_out(self, switch: Switch) -> None:
        """Takes note that a worker was told; one that was not asks again in the next cycle."""
        if switch.cycles:
            self._helping[switch.worker_id] = Help(switch.role, switch.cycles)
        else:
            self._helping.pop(switch.worker_id, None)
            self._rests[other(switch.role)].begin(switch.reason)

    def _score(self, reading: WorkerReading, now: float) -> ScoredWorker:
        window = self._windows.setdefault(reading.worker_id, ScoreWindow(SCORE_WINDOW_S))
        window.add(score(reading.state, reading.capacity), now)
        return ScoredWorker(reading.worker_id, reading.role is Role.PREFILL, window.mean)
