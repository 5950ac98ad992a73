"""The loops above single requests, for the scheduler and the simulator alike: roles every second
(FlowKV), threshold and allocation every few minutes (PrfaaS).

Each loop keeps what it has seen and decides; whoever owns it measures, waits and carries out.
Source: FlowKV Algorithm 1, PrfaaS 3.4.3. Tests: tests/unit/policy/test_control.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvmesh.core.types import Role, WorkerId, WorkerInfo, WorkerLoad
from kvmesh.policy.lengths import LengthDistribution
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
from kvmesh.policy.offload import Threshold
from kvmesh.policy.prfaas import (
    Hardware,
    OperatingPoint,
    ServingProfile,
    operating_point,
    optimum,
    search,
    threshold_grid,
)
from kvmesh.policy.reallocation import Reallocation, StageQueues, plan_reallocation
from kvmesh.policy.role_switch import Help, Switch, SwitchLimits, SwitchReason, other, plan_switches

CYCLE_S = 1.0
"""Fast scale: threshold and role switches."""

REALLOCATE_S = 120.0
"""Slow scale: lengths, base threshold and allocation."""

SCORE_WINDOW_S = 5.0
LENGTHS_WINDOW = 2000
MIN_LENGTHS = 400
"""Lengths scatter about as much as their mean is long: the mean of fewer is off by more than the
gain that is worth a change."""

GRID_POINTS = 200
MAX_STEPS = 8
"""Splits that are further away than this are not searched: an evaluation moves one instance."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests that look for a worker, by what they wait for."""

    prefill: float
    decode: float


def split_waiting(reserved: float, unreserved: float, loads: Iterable[WorkerLoad]) -> Waiting:
    """Tells what requests at the gateways wait for.

    One with a reservation waits for prefill. One without finds the decode slots taken, by sequences
    that run or by reservations of others; the latter wait for prefill, and so does whoever waits
    for them.

    Args:
        reserved, unreserved: requests that wait with a reservation and without one.
        loads: of all workers at home.
    """
    running = reservations = 0
    for load in loads:
        running += load.decode_running
        reservations += load.decode_reserved
    share = running / (running + reservations) if running + reservations else 1.0
    return Waiting(reserved + unreserved * (1.0 - share), unreserved * share)


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """A worker as the role loop sees it in one cycle."""

    worker_id: WorkerId
    role: Role
    state: LoadState
    capacity: Capacity


def room_used(info: WorkerInfo, load: WorkerLoad) -> float:
    """Share of the room for sequences: of blocks, and where they decode of slots, whichever is
    scarcer. A decode worker without a free slot is full, however short its sequences are.
    """
    blocks = 1.0 - load.blocks_free / max(info.num_blocks, 1)
    if info.role is Role.PREFILL:
        return blocks
    return max(blocks, load.decode_running / max(info.decode_slots, 1))


def read_worker(info: WorkerInfo, load: WorkerLoad, waiting: Waiting) -> WorkerReading:
    """The twelve indicators of a worker that reports its load.

    Args:
        waiting: for this worker: its even share of what waits at the gateways for its side.
    """
    prefills = info.role is Role.PREFILL
    slots_used = load.decode_running / max(info.decode_slots, 1)
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
    capacity = Capacity(info.prefill_slots, info.decode_slots)
    return WorkerReading(info.worker_id, info.role, state, capacity)


# --- roles, every CYCLE_S ------------------------------------------------------------------------


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

    def __init__(self, limits: SwitchLimits | None = None) -> None:
        self._limits = limits or SwitchLimits()
        self._windows: dict[WorkerId, ScoreWindow] = {}
        self._helping: dict[WorkerId, Help] = {}
        self._rests = {role: _Rest(self._limits) for role in (Role.PREFILL, Role.DECODE)}

    @property
    def is_helping(self) -> bool:
        """Whether a worker is away from its own side."""
        return bool(self._helping)

    def cycle(self, readings: Sequence[WorkerReading], now: float) -> RoleCycle:
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
        scored = [self._score(each, now) for each in readings]
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


# --- allocation, every REALLOCATE_S ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Allocation:
    """What one evaluation found.

    Attributes:
        points: the operating points that were searched.
    """

    move: Reallocation
    points: tuple[OperatingPoint, ...]

    def threshold(self, before: Threshold, num_prefill: int) -> Threshold:
        """The threshold for a split, raised as much as the one before was.

        The fast loop brings it back to the base, and lowers it again where that is needed.
        """
        best = optimum(p for p in self.points if p.num_prefill == num_prefill)
        base = best.threshold_tokens
        # Of an endless one nothing can be raised, and infinity by infinity is no number.
        is_finite = math.isfinite(before.base_tokens)
        lift = max(before.tokens / max(before.base_tokens, 1.0), 1.0) if is_finite else 1.0
        return Threshold(base, base * lift)


class AllocationLoop:
    """PrfaaS's slow scale: lengths and queues of late, and what the model makes of them."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=LENGTHS_WINDOW)
        self._outputs: deque[float] = deque(maxlen=LENGTHS_WINDOW)
        self._waiting: list[Waiting] = []

    @property
    def has_lengths(self) -> bool:
        """Whether enough prompts were seen to trust their mean."""
        return len(self._lengths) >= MIN_LENGTHS

    def note_prompt(self, uncached_tokens: int, output_tokens: float) -> None:
        """Takes a prompt into the distribution.

        Args:
            output_tokens: that it generates, or the best guess.
        """
        self._lengths.append(max(uncached_tokens, 1))
        self._outputs.append(output_tokens)

    def observe(self, waiting: Waiting) -> None:
        """Takes a sample of the queues; one per cycle."""
        self._waiting.append(waiting)

    def take_queues(self, num_prefill: int, num_decode: int) -> StageQueues:
        """Mean queues per instance since the last call."""
        count = max(len(self._waiting), 1)
        queues = StageQueues(
            sum(each.prefill for each in self._waiting) / count / max(num_prefill, 1),
            sum(each.decode for each in self._waiting) / count / max(num_decode, 1),
        )
        self._waiting.clear()
        return queues

    def question(
        self,
        serving: ServingProfile,
        hardware: Hardware,
        threshold: Threshold,
        num_prefill: int,
        queues: StageQueues,
    ) -> AllocationQuestion:
        """What is to be compared, with the prompts of late.

        Args:
            serving: its `output_tokens` are replaced by those that were seen.
            num_prefill: local prefill instances now.
            queues: from `take_queues`.
        """
        output = max(sum(self._outputs) / len(self._outputs), 1.0)
        return AllocationQuestion(
            dataclasses.replace(serving, output_tokens=output),
            tuple(self._lengths),
            hardware,
            threshold,
            num_prefill,
            queues,
        )


@dataclass(frozen=True, slots=True)
class AllocationQuestion:
    """All that one evaluation reads; it shares nothing, so another thread may answer it."""

    serving: ServingProfile
    lengths: tuple[int, ...]
    hardware: Hardware
    threshold: Threshold
    num_prefill: int
    queues: StageQueues

    def answer(self) -> Allocation:
        """Compares the split that runs with the best one for these prompts."""
        lengths = LengthDistribution(self.lengths)
        low = max(self.num_prefill - MAX_STEPS, 0)
        high = min(self.num_prefill + MAX_STEPS, self.hardware.num_local)
        grid = threshold_grid(lengths, GRID_POINTS)
        points = search(self.serving, lengths, self.hardware, grid, range(low, high + 1))
        now = operating_point(
            self.serving, lengths, self.hardware, self.threshold.base_tokens, self.num_prefill
        )
        return Allocation(plan_reallocation(now, optimum(points), self.queues), tuple(points))
