"""The slow loops of a simulation: threshold, role switches, reallocation.

Each gathers what its policy reads and carries out what it returns.
Tests: tests/unit/sim/test_control.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, deque
from collections.abc import Callable

from kvmesh.core.types import Role, WorkerId
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.load_score import (
    Capacity,
    LoadState,
    Queues,
    ScoredWorker,
    ScoreWindow,
    classify,
    fleet_score,
    score,
)
from kvmesh.policy.offload import LinkState, Threshold, adjust_threshold
from kvmesh.policy.prfaas import (
    Hardware,
    ServingProfile,
    operating_point,
    optimum,
    search,
    threshold_grid,
)
from kvmesh.policy.reallocation import StageQueues, plan_reallocation
from kvmesh.policy.role_switch import Help, plan_switches
from kvmesh.sim.events import EventQueue
from kvmesh.sim.fleet import REMOTE, SimFleet
from kvmesh.sim.placing import Desk
from kvmesh.sim.requests import SimRequest
from kvmesh.sim.scenario import Scenario
from kvmesh.sim.systems import Offload
from kvmesh.sim.trace import uncached_lengths
from kvmesh.sim.worker import SimWorker

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


class Control:
    """The loops of one run.

    Args:
        reasons: decisions are counted here.
    """

    def __init__(
        self,
        scenario: Scenario,
        events: EventQueue,
        fleet: SimFleet,
        desk: Desk,
        reasons: Counter[str],
    ) -> None:
        self._scenario = scenario
        self._events = events
        self._fleet = fleet
        self._desk = desk
        self._reasons = reasons
        self._lengths: deque[int] = deque(maxlen=LENGTHS_WINDOW)
        self._outputs: deque[int] = deque(maxlen=LENGTHS_WINDOW)
        self._windows: dict[WorkerId, ScoreWindow] = {}
        self._helping: dict[WorkerId, Help] = {}
        self._queues: list[tuple[float, float]] = []
        self._carried = 0.0
        self._threshold = self._start_threshold()

    @property
    def threshold_tokens(self) -> float:
        """Longer uncached prompts go to the offload cluster."""
        return self._threshold.tokens

    def start(self) -> None:
        """Schedules the loops that the system has."""
        system = self._scenario.system
        if system.offload is Offload.ADAPTIVE and self._remote():
            self._every(CYCLE_S, self._adjust)
        if system.switch_roles:
            self._every(CYCLE_S, self._switch_roles)
        if system.reallocate:
            self._every(CYCLE_S, self._observe_queues)
            self._every(REALLOCATE_S, self._reallocate)

    def note_prompt(self, request: SimRequest) -> None:
        """Takes a prompt into the online distribution of uncached lengths."""
        self._lengths.append(max(request.num_tokens - request.cached_tokens, 1))
        self._outputs.append(request.trace.output_tokens)

    def _every(self, period_s: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self._events.after(period_s, again)

        self._events.after(period_s, again)

    # --- threshold ---------------------------------------------------------------------------

    def _start_threshold(self) -> Threshold:
        """From the lengths of the workload, as profiling before the start would give them."""
        offload = self._scenario.system.offload
        if offload is Offload.ALL:
            return Threshold(0.0, 0.0)
        if offload is Offload.NONE or not self._remote():
            return Threshold(math.inf, math.inf)
        lengths = uncached_lengths(self._scenario.requests)
        num_prefill = sum(w.info.role is Role.PREFILL for w in self._local())
        points = search(
            self._serving(), lengths, self._hardware(), threshold_grid(lengths), [num_prefill]
        )
        best = optimum(points).threshold_tokens
        return Threshold(best, best)

    def _adjust(self) -> None:
        carried, _ = self._fleet.between.use_until_now()
        rate = (carried - self._carried) / CYCLE_S
        self._carried = carried
        # Who holds a reservation waits for prefill; the others wait for decode, wherever they go.
        waiting = Counter(
            request.remote for request, each in self._desk.searching.items() if each.has_reservation
        )
        num_local = sum(worker.info.role is not Role.DECODE for worker in self._local())
        link = LinkState(
            min(rate / self._fleet.between.bytes_per_s, 1.0),
            waiting[True] / max(len(self._remote()), 1),
            waiting[False] / max(num_local, 1),
        )
        before = self._threshold.tokens
        self._threshold = adjust_threshold(self._threshold, link)
        self._fleet.openings += self._threshold.tokens != before
        self._reasons[f"threshold: {self._threshold.reason.value}"] += 1

    # --- role switches -----------------------------------------------------------------------

    def _switch_roles(self) -> None:
        local = [worker for worker in self._local() if worker.info.role is not Role.HYBRID]
        scored = self._score(local)
        fleet = fleet_score(scored)
        regime = classify(fleet)
        self._reasons[f"regime: {regime.value}"] += 1
        self._helping = {
            name: Help(help_.role, help_.cycles_left - 1) for name, help_ in self._helping.items()
        }
        for switch in plan_switches(scored, fleet, regime, self._helping):
            self._fleet.workers[switch.worker_id].set_role(switch.role)
            self._reasons[f"switch: {switch.reason.value}"] += 1
            if switch.cycles:
                self._helping[switch.worker_id] = Help(switch.role, switch.cycles)
            else:
                self._helping.pop(switch.worker_id)

    def _score(self, workers: list[SimWorker]) -> list[ScoredWorker]:
        num_prefill = max(sum(w.info.role is Role.PREFILL for w in workers), 1)
        num_decode = max(len(workers) - num_prefill, 1)
        for_prefill, for_decode = self._waiting()
        scored: list[ScoredWorker] = []
        for worker in workers:
            state = _state(worker, for_prefill / num_prefill, for_decode / num_decode)
            capacity = Capacity(worker.info.prefill_slots, worker.info.decode_slots)
            name = worker.info.worker_id
            window = self._windows.setdefault(name, ScoreWindow(SCORE_WINDOW_S))
            window.add(score(state, capacity), self._events.now())
            scored.append(ScoredWorker(name, worker.info.role is Role.PREFILL, window.mean))
        return scored

    # --- reallocation ------------------------------------------------------------------------

    def _observe_queues(self) -> None:
        self._queues.append(self._waiting())

    def _mean_queues(self) -> StageQueues:
        """Of the time since the last evaluation, per instance of each stage."""
        local = self._local()
        num_prefill = sum(worker.info.role is Role.PREFILL for worker in local)
        num_decode = len(local) - num_prefill
        count = max(len(self._queues), 1)
        queues = StageQueues(
            sum(prefill for prefill, _ in self._queues) / count / max(num_prefill, 1),
            sum(decode for _, decode in self._queues) / count / max(num_decode, 1),
        )
        self._queues.clear()
        return queues

    def _reallocate(self) -> None:
        queues = self._mean_queues()
        if len(self._lengths) < MIN_LENGTHS or self._helping:
            return
        lengths = LengthDistribution(self._lengths)
        serving = dataclasses.replace(
            self._serving(), output_tokens=sum(self._outputs) / len(self._outputs)
        )
        hardware = self._hardware()
        movable = [worker for worker in self._local() if worker.info.role is not Role.HYBRID]
        num_prefill = sum(worker.info.role is Role.PREFILL for worker in movable)
        grid = threshold_grid(lengths, GRID_POINTS)
        points = search(serving, lengths, hardware, grid)
        now = operating_point(serving, lengths, hardware, self._threshold.base_tokens, num_prefill)
        move = plan_reallocation(now, optimum(points), queues)
        self._reasons[f"reallocation: {move.reason.value}"] += 1
        if move.to_role is not None:
            candidates = [worker for worker in movable if worker.info.role is not move.to_role]
            if len(candidates) > 1:
                quietest = min(candidates, key=lambda w: (_share(w), w.info.worker_id))
                quietest.set_role(move.to_role)
                num_prefill += 1 if move.to_role is Role.PREFILL else -1
        if self._scenario.system.offload is Offload.ADAPTIVE and hardware.num_remote:
            base = optimum(p for p in points if p.num_prefill == num_prefill).threshold_tokens
            # A raised threshold stays raised by as much; the fast loop lowers it.
            lift = max(self._threshold.tokens / max(self._threshold.base_tokens, 1.0), 1.0)
            self._threshold = Threshold(base, base * lift)

    # --- what is read ------------------------------------------------------------------------

    def _waiting(self) -> tuple[float, float]:
        """Requests that wait for prefill, and for decode.

        One with a reservation waits for prefill. One without finds the decode slots taken, by
        sequences that run or by reservations of others; the latter wait for prefill, and so does
        whoever waits for them.
        """
        held = sum(each.has_reservation for each in self._desk.searching.values())
        rest = len(self._desk.searching) - held
        loads = [worker.load() for worker in self._local()]
        running = sum(load.decode_running for load in loads)
        reserved = sum(load.decode_reserved for load in loads)
        share = running / (running + reserved) if running + reserved else 1.0
        return held + rest * (1.0 - share), rest * share

    def _remote(self) -> list[SimWorker]:
        return [w for w in self._fleet.living() if w.info.cluster == REMOTE]

    def _local(self) -> list[SimWorker]:
        return [w for w in self._fleet.living() if w.info.cluster != REMOTE]

    def _serving(self) -> ServingProfile:
        return self._scenario.profile.serving

    def _hardware(self) -> Hardware:
        return Hardware(len(self._remote()), len(self._local()), self._fleet.between.bytes_per_s)


def _state(worker: SimWorker, prefill_waiting: float, decode_waiting: float) -> LoadState:
    """The indicators of a worker; what waits at the gateways counts evenly for its side."""
    load = worker.load()
    is_prefill = worker.info.role is Role.PREFILL
    prefilling = load.prefill_active - worker.num_waiting
    return LoadState(
        prefill=Queues(
            running=prefilling,
            waiting=worker.num_waiting + (prefill_waiting if is_prefill else 0.0),
        ),
        decode=Queues(
            running=load.decode_running,
            waiting=0.0 if is_prefill else decode_waiting,
            swapped=load.decode_preempted,
        ),
        budget_used=1.0 if prefilling else load.decode_running / worker.info.decode_slots,
        blocks_used=1.0 - load.blocks_free / worker.info.num_blocks,
        compute_used=1.0 if prefilling else 0.0,
        memory_bandwidth_used=load.decode_running / worker.info.decode_slots,
    )


def _share(worker: SimWorker) -> float:
    load = worker.load()
    if worker.info.role is Role.PREFILL:
        return load.prefill_active / worker.info.prefill_slots
    return load.decode_running / worker.info.decode_slots
