"""The control loops of a simulation: threshold, role switches, reallocation.

They are the scheduler's own. This module reports to them what live workers and gateways would, and
carries out their decisions.
Tests: tests/unit/sim/test_control.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from kvmesh.core.details import FleetWorker
from kvmesh.core.pace import StepPace
from kvmesh.core.summary_statistics import mean
from kvmesh.core.turns import at_once
from kvmesh.core.types import Role, RoutePlan, WorkerId, WorkerLoad
from kvmesh.core.values import changed
from kvmesh.policy.allocation_loop import REALLOCATE_S, AllocationLoop
from kvmesh.policy.group_loops import GroupLoops, RoleLoops, givers, sole_giver
from kvmesh.policy.measurement import MeanAnswer
from kvmesh.policy.offload import OffloadState, Threshold
from kvmesh.policy.prfaas import Hardware, ServingProfile, optimum, search, threshold_grid
from kvmesh.policy.profiled_ratio import MeanLengths
from kvmesh.policy.ratio_monitor import WINDOW_S
from kvmesh.policy.role_loop import CYCLE_S, decode_slots
from kvmesh.policy.sending import SendingMeter, SendingTotal
from kvmesh.policy.threshold_loop import ThresholdLoop, ThresholdReading
from kvmesh.policy.waiting import Demand, split_waiting
from kvmesh.sim.events import EventQueue
from kvmesh.sim.fleet import REMOTE, SimFleet
from kvmesh.sim.placing import Desk, waiting_by_scenario
from kvmesh.sim.requests import SimRequest
from kvmesh.sim.scenario import Scenario
from kvmesh.sim.systems import Offload
from kvmesh.sim.trace import uncached_lengths
from kvmesh.sim.worker import SimWorker


class Control:
    """The loops of one run. Each group has roles and a ratio of its own.

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
        self._roles = RoleLoops()
        self._ratios = GroupLoops()
        self._allocation = AllocationLoop()
        self._answers = MeanAnswer()
        self._generated: dict[tuple[WorkerId, int], int] = {}
        self._num_new = 0
        self._carried = 0.0
        self._window_ends = events.now() + WINDOW_S
        self._sending = SendingMeter()
        # As in the service, a loss of bandwidth shows only in the bytes that leave.
        self._offload = ThresholdLoop(self._start_threshold(), fleet.between.bytes_per_s)

    @property
    def offload(self) -> OffloadState:
        """Inputs of the choice of cluster."""
        return OffloadState(REMOTE, self.threshold_tokens, self._offload.has_room)

    @property
    def threshold_tokens(self) -> float:
        """Uncached tokens above which prompts go to the offload cluster."""
        return self._offload.threshold.tokens

    def start(self) -> None:
        """Schedules the loops that the system has."""
        system = self._scenario.system
        adapts = system.offload is Offload.ADAPTIVE and bool(self._remote())
        if adapts or system.switch_roles or system.monitor or system.reallocate:
            self._every(CYCLE_S, self.cycle)
        if system.reallocate:
            self._every(REALLOCATE_S, self.reallocate)

    def cycle(self) -> None:
        """Runs one step of the fast loops, in the order of the service (`Planner.cycle`)."""
        system = self._scenario.system
        workers, demand = self._reports(), self._demand()
        self._observe_answers()
        if system.reallocate:
            loads = [each.load for each in workers]
            waiting = split_waiting(demand.reserved, demand.unreserved, loads)
            self._allocation.observe(waiting)
        if system.monitor:
            at_once(self._ratios.observe(workers, demand, CYCLE_S))
        if system.offload is Offload.ADAPTIVE and self._remote():
            self._adjust(demand)
        if system.switch_roles:
            self._switch_roles(workers, demand)
        if system.monitor and self._events.now() >= self._window_ends:
            self._window_ends = self._events.now() + WINDOW_S
            self._move_ratios(workers)

    def note_prompt(self, request: SimRequest, plan: RoutePlan) -> None:
        """Adds a new request, with its first plan, as a scheduler does."""
        uncached = request.num_tokens - plan.prefill[0].cached_tokens
        output = self._answers.expected(request.trace.output_tokens)
        self._num_new += 1
        self._allocation.note_prompt(uncached, output)
        lengths = MeanLengths(uncached, request.num_tokens, output)
        self._ratios.note_new(request.trace.scenario, lengths)

    def _every(self, period_s: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self._events.after(period_s, again)

        self._events.after(period_s, again)

    # --- threshold ---------------------------------------------------------------------------

    def _start_threshold(self) -> Threshold:
        """Returns the best threshold for the workload's lengths, as offline profiling would."""
        offload = self._scenario.system.offload
        if offload is Offload.ALL:
            return Threshold(0.0, 0.0)
        if offload is Offload.NONE or not self._remote():
            return Threshold(math.inf, math.inf)
        lengths = uncached_lengths(self._scenario.requests)
        num_prefill = sum(w.info.role is Role.PREFILL for w in self._local())
        hardware = self._hardware(self._fleet.between.bytes_per_s)
        points = search(self._serving(), lengths, hardware, threshold_grid(lengths), [num_prefill])
        best = optimum(points).threshold_tokens
        return Threshold(best, best)

    def _adjust(self, demand: Demand) -> None:
        carried, _ = self._fleet.between.use_until_now()
        now = self._events.now()
        told = {
            (each.info.worker_id, each.info.incarnation): SendingTotal(
                now, each.sending.seconds(now)
            )
            for each in self._remote()
        }
        reading = ThresholdReading(
            sent_bytes=int(carried) - int(self._carried),
            leaving_bytes=int(self._fleet.between.bytes_left),
            remote_waiting=demand.remote,
            local_waiting=demand.local,
            num_remote=len(self._remote()),
            num_local=sum(worker.info.role is not Role.DECODE for worker in self._local()),
            sending=self._sending.observe(told),
        )
        self._carried = carried
        self._fleet.openings += self._offload.cycle(reading, CYCLE_S)
        self._reasons[f"threshold: {self._offload.threshold.reason.value}"] += 1

    # --- role switches -----------------------------------------------------------------------

    def _switch_roles(self, workers: Sequence[FleetWorker], demand: Demand) -> None:
        for work in at_once(self._roles.work(workers, demand)):
            cycle = at_once(work.cycle(self._events.now()))
            self._reasons[f"regime: {cycle.regime.value}"] += 1
            for switch in cycle.switches:
                self._fleet.workers[switch.worker_id].set_role(switch.role)
                work.loop.carried_out(switch)
                self._reasons[f"switch: {switch.reason.value}"] += 1

    # --- reallocation ------------------------------------------------------------------------

    def reallocate(self) -> None:
        """Runs one step of the slow loop."""
        local = self._reports()
        num_prefill = sum(each.info.role is Role.PREFILL for each in local)
        queues = self._allocation.take_queues(num_prefill, len(local) - num_prefill)
        if not self._allocation.has_lengths or self._roles.is_helping:
            return
        hardware = self._hardware(self._offload.take_capacity())
        loads = [(each.info, each.load) for each in local]
        question = self._allocation.question(
            self._serving(), hardware, self._offload.threshold, loads, queues
        )
        if not question.is_open(switch_roles=self._scenario.system.switch_roles):
            return
        found = question.answer()
        role = found.move.to_role
        self._reasons[f"reallocation: {found.move.reason.value}"] += 1
        giver = sole_giver(role, local)
        if giver is not None and role is not None:
            self._fleet.workers[giver].set_role(role)
            num_prefill += 1 if role is Role.PREFILL else -1
        if self._scenario.system.offload is Offload.ADAPTIVE and hardware.num_remote:
            self._offload.threshold = found.threshold(self._offload.threshold, num_prefill)

    def _observe_answers(self) -> None:
        """Measures the mean length of answers, which no scheduler knows beforehand."""
        before, self._generated = self._generated, {}
        num_generated = 0
        for worker in self._fleet.living():
            life = worker.info.worker_id, worker.info.incarnation
            total = self._generated[life] = worker.steps.generated_tokens
            num_generated += total - before.get(life, total)
        self._answers.observe(num_generated, self._num_new)
        self._num_new = 0

    def _move_ratios(self, workers: Sequence[FleetWorker]) -> None:
        for found in self._ratios.end_window(workers, self._prompt_s):
            role, reason = found.step.grow, found.step.reason
            self._reasons[f"monitor: {reason.value}"] += 1
            giving = givers(role, found.members, found.step.count)
            if role is None or not giving:
                continue
            for name in giving:
                self._fleet.workers[name].set_role(role)
            self._ratios.carried_out(found.group)

    def _prompt_s(self, uncached_tokens: float) -> float:
        """Returns the seconds of a prompt that a scheduler would measure at home."""
        return mean([each.device.prefill_s(uncached_tokens) for each in self._local()])

    # --- inputs of the policies --------------------------------------------------------------

    def _demand(self) -> Demand:
        """Returns the requests that wait at the gateways."""
        return Demand(waiting_by_scenario(self._desk.searching))

    def _reports(self) -> list[FleetWorker]:
        """Returns the local workers with the loads that they report."""
        return [FleetWorker(each.info, reported_load(each)) for each in self._local()]

    def _remote(self) -> list[SimWorker]:
        return [w for w in self._fleet.living() if w.info.cluster == REMOTE]

    def _local(self) -> list[SimWorker]:
        return [w for w in self._fleet.living() if w.info.cluster != REMOTE]

    def _serving(self) -> ServingProfile:
        return self._scenario.profile.serving

    def _hardware(self, egress_bytes_per_s: float) -> Hardware:
        return Hardware(len(self._remote()), len(self._local()), egress_bytes_per_s)


def reported_load(worker: SimWorker) -> WorkerLoad:
    """Returns the load that a live worker in this state reports: without a queue of its own.

    It models a real engine's measurements: prompts keep a worker busy, and decode steps do in
    proportion to the slots in use.
    """
    info, load, cost = worker.info, worker.load(), worker.device.decode
    accepted = load.prefill_active - worker.num_waiting
    is_computing = accepted > load.prefill_sending
    room = load.room
    if room.pace == StepPace():
        pace = StepPace(cost.constant + cost.per_sequence * info.decode_slots, cost.per_token)
        room = changed(room, pace=pace)
    return changed(
        load,
        prefill_active=accepted,
        budget_used=float(is_computing),
        compute_used=float(is_computing),
        memory_bandwidth_used=load.decode_running / max(decode_slots(info, load), 1),
        room=room,
    )
