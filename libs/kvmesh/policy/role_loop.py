"""FlowKV's controller, run every second: load scores, and the workers that help the other side. The
scheduler and the simulator both use it.

The loop keeps observations and decides; its owner measures, waits and carries out.
Source: FlowKV Algorithm 1. Tests: tests/unit/policy/test_role_loop.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core.turns import Parts, is_turn_over
from kvmesh.core.types import Role, WorkerId, WorkerInfo, WorkerLoad
from kvmesh.core.values import quick
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
"""Seconds between two cycles of threshold and role switches."""

SCORE_WINDOW_S = 5.0
"""Seconds over which load scores are averaged (the sliding window of FlowKV B.2)."""


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """A worker as the role loop sees it in one cycle."""

    worker_id: WorkerId
    role: Role
    state: LoadState
    capacity: Capacity


quick(WorkerReading)  # for speed, as in `load_score.py`


def room_used(info: WorkerInfo, load: WorkerLoad) -> float:
    """Returns the used fraction of a worker's room for sequences, KV_u of FlowKV B.2.

    For prefill it is the used share of the blocks. For decode it is the largest share of blocks, of
    slots, and of the strictest TPOT limit: a worker without a free slot is full, however short its
    sequences are.
    """
    blocks = 1.0 - load.blocks_free / max(info.num_blocks, 1)
    if info.role is Role.PREFILL:
        return blocks
    slots = load.decode_running / max(info.decode_slots, 1)
    return max(blocks, slots, min(time_used(load.room), 1.0))


def decode_slots(info: WorkerInfo, load: WorkerLoad) -> float:
    """Returns the number of sequences like the present ones that a worker can decode.

    These are its slots, or fewer if TPOT limits leave too little time.
    """
    running, share = load.decode_running, context_share(load.room)
    return min(info.decode_slots, max(running / share, 1.0)) if share else info.decode_slots


def read_worker(info: WorkerInfo, load: WorkerLoad, waiting: Waiting) -> WorkerReading:
    """Returns the twelve indicators of FlowKV B.2 from a worker's reported load.

    Args:
        waiting: requests that wait for this worker: its equal share of those that wait at the
            gateways for its side.
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
    """Result of one cycle: the load state, the fleet's scores and the switches to carry out."""

    regime: Regime
    fleet: Score
    switches: tuple[Switch, ...]


class _Rest:
    """Rest of a side: cycles in which no worker begins to help it.

    Help was a mistake if the helpers' own side calls them back. Each mistake doubles the rest. All
    helpers called back in one cycle count as one mistake, whichever others return in it.

    Attributes:
        cycles_left: cycles of rest that are left; 0 while the side may be helped.
    """

    def __init__(self, limits: SwitchLimits) -> None:
        self._limits = limits
        self.cycles_left = 0
        self._next = self._last = limits.rest_cycles
        self._was_called = False

    def cycle(self) -> None:
        """Starts a cycle."""
        self.cycles_left = max(self.cycles_left - 1, 0)
        self._last, self._was_called = self._next, False

    def begin(self, why: SwitchReason) -> None:
        """Starts a rest, after a helper returned for the given reason."""
        if why is SwitchReason.NEEDED_AT_HOME:
            self._next = min(2 * self._last, self._limits.max_rest_cycles)
            self._was_called = True
        elif not self._was_called:
            self._next = self._limits.rest_cycles
        self.cycles_left = self._next


class _Kept:
    """The last reading of a worker, its inputs, and its score."""

    __slots__ = ("info", "load", "reading", "score", "waiting")

    def __init__(self, info: WorkerInfo, load: WorkerLoad, waiting: Waiting) -> None:
        self.info = info
        self.load = load
        self.waiting = waiting
        self.reading = read_worker(info, load, waiting)
        self.score = score(self.reading.state, self.reading.capacity)


class RoleLoop:
    """FlowKV's controller: windowed scores, the load state, and the workers that help."""

    def __init__(self) -> None:
        self._limits = SwitchLimits()
        self._kept: dict[WorkerId, _Kept] = {}
        self._windows: dict[WorkerId, ScoreWindow] = {}
        self._helping: dict[WorkerId, Help] = {}
        self._rests = {role: _Rest(self._limits) for role in (Role.PREFILL, Role.DECODE)}

    @property
    def is_helping(self) -> bool:
        """Whether a worker helps the other side now."""
        return bool(self._helping)

    def read(self, info: WorkerInfo, load: WorkerLoad, waiting: Waiting) -> WorkerReading:
        """Same as `read_worker`; a load that has not changed since is not read again."""
        kept = self._kept.get(info.worker_id)
        if (
            kept is None
            or kept.load is not load
            or kept.info is not info
            or kept.waiting != waiting
        ):
            kept = self._kept[info.worker_id] = _Kept(info, load, waiting)
        return kept.reading

    def cycle(self, readings: Sequence[WorkerReading], now: float) -> Parts[RoleCycle]:
        """Decides for one cycle.

        Args:
            readings: one of each live prefill or decode worker; hybrids are left out.
        """
        roles = {each.worker_id: each.role for each in readings}
        for name in self._windows.keys() - roles.keys():
            del self._windows[name]
            self._kept.pop(name, None)
        # Workers that left, or got another role from elsewhere, no longer help.
        self._helping = {
            name: Help(help_.role, help_.cycles_left - 1)
            for name, help_ in self._helping.items()
            if roles.get(name) is help_.role
        }
        for rest in self._rests.values():
            rest.cycle()
        scored: list[ScoredWorker] = []
        for number, each in enumerate(readings):
            if is_turn_over(number):
                yield
            scored.append(self._score(each, now))
        yield
        fleet = fleet_score(scored)
        yield
        regime = classify(fleet)
        resting = [role for role, rest in self._rests.items() if rest.cycles_left]
        switches = plan_switches(
            scored, fleet, regime, self._helping, self._limits, resting=resting
        )
        return RoleCycle(regime, fleet, tuple(switches))

    def carried_out(self, switch: Switch) -> None:
        """Records that a worker got the order; one that did not is ordered again next cycle."""
        if switch.cycles:
            self._helping[switch.worker_id] = Help(switch.role, switch.cycles)
        else:
            self._helping.pop(switch.worker_id, None)
            self._rests[other(switch.role)].begin(switch.reason)

    def _score(self, reading: WorkerReading, now: float) -> ScoredWorker:
        window = self._windows.get(reading.worker_id)
        if window is None:
            window = self._windows[reading.worker_id] = ScoreWindow(SCORE_WINDOW_S)
        kept = self._kept.get(reading.worker_id)
        if kept is not None and kept.reading is reading:
            window.add(kept.score, now)
        else:
            window.add(score(reading.state, reading.capacity), now)
        return ScoredWorker(reading.worker_id, reading.role is Role.PREFILL, window.mean)
