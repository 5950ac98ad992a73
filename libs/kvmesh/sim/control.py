"""The control loops of a simulation: threshold, role switches, reallocation.

Each collects its policy's inputs and carries out the policy's decision.
Tests: tests/unit/sim/test_control.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvmesh.core.pace import StepPace
from kvmesh.core.turns import at_once
from kvmesh.core.types import Role, RoutePlan, WorkerId, WorkerLoad
from kvmesh.core.values import changed
from kvmesh.policy.allocation_loop import REALLOCATE_S, AllocationLoop
from kvmesh.policy.groups import GroupKey, shares_of_groups
from kvmesh.policy.measurement import MeanAnswer
from kvmesh.policy.offload import OffloadState, Threshold
from kvmesh.policy.pdserve import InstanceProfile
from kvmesh.policy.prfaas import Hardware, ServingProfile, optimum, search, threshold_grid
from kvmesh.policy.profiled_ratio import MeanLengths, measured_profile
from kvmesh.policy.ratio_monitor import WINDOW_S, RatioMonitor, StageCounts
from kvmesh.policy.reallocation import choose_giver
from kvmesh.policy.role_loop import CYCLE_S, RoleLoop, WorkerReading, decode_slots
from kvmesh.policy.sending import SendingMeter, SendingTotal
from kvmesh.policy.threshold_loop import ThresholdLoop, ThresholdReading
from kvmesh.policy.waiting import Waiting, split_waiting
from kvmesh.sim.events import EventQueue
from kvmesh.sim.fleet import MODEL, REMOTE, SimFleet
from kvmesh.sim.placing import Desk
from kvmesh.sim.requests import SimRequest
from kvmesh.sim.scenario import Scenario
from kvmesh.sim.systems import Offload
from kvmesh.sim.trace import uncached_lengths
from kvmesh.sim.trace_request import TRACE_BLOCK
from kvmesh.sim.worker import SimWorker


@dataclass(slots=True)
class _Group:
    """Loops of one group.

    Attributes:
        num_new: requests that arrived since the last sample.
    """

    roles: RoleLoop = field(default_factory=RoleLoop)
    monitor: RatioMonitor = field(default_factory=RatioMonitor)
    num_new: int = 0


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
        self._groups = {each.info.scenario: _Group() for each in fleet.workers.values()}
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
        self._observe_answers()
        if system.reallocate:
            self._allocation.observe(self._waiting())
        if system.monitor:
            self._observe_stages()
        if system.offload is Offload.ADAPTIVE and self._remote():
            self._adjust()
        if system.switch_roles:
            self._switch_roles()
        if system.monitor and self._events.now() >= self._window_ends:
            self._window_ends = self._events.now() + WINDOW_S
            self._move_ratios()

    def note_prompt(self, request: SimRequest, plan: RoutePlan) -> None:
        """Adds a new request, with its first plan, as a scheduler does.

        It counts for the group of the plan's first worker.
        """
        uncached = request.num_tokens - plan.prefill[0].cached_tokens
        output = self._answers.expected(request.trace.output_tokens)
        self._num_new += 1
        self._allocation.note_prompt(uncached, output)
        group = self._groups[self._fleet.workers[plan.prefill[0].worker_id].info.scenario]
        group.monitor.note_prompts(MeanLengths(uncached, request.num_tokens, output))
        group.num_new += 1

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

    def _adjust(self) -> None:
        carried, _ = self._fleet.between.use_until_now()
        now = self._events.now()
        told = {
            (each.info.worker_id, each.info.incarnation): SendingTotal(
                now, each.sending.seconds(now)
            )
            for each in self._remote()
        }
        # A request with a reservation waits for prefill; any other waits for decode.
        waiting = Counter(
            request.remote for request, each in self._desk.searching.items() if each.has_reservation
        )
        reading = ThresholdReading(
            sent_bytes=int(carried) - int(self._carried),
            leaving_bytes=int(self._fleet.between.bytes_left),
            remote_waiting=waiting[True],
            local_waiting=waiting[False],
            num_remote=len(self._remote()),
            num_local=sum(worker.info.role is not Role.DECODE for worker in self._local()),
            sending=self._sending.observe(told),
        )
        self._carried = carried
        self._fleet.openings += self._offload.cycle(reading, CYCLE_S)
        self._reasons[f"threshold: {self._offload.threshold.reason.value}"] += 1

    # --- role switches -----------------------------------------------------------------------

    def _switch_roles(self) -> None:
        for label, group in self._groups.items():
            readings = self._read(group.roles, self._movable(label), self._waiting(label))
            cycle = at_once(group.roles.cycle(readings, self._events.now()))
            self._reasons[f"regime: {cycle.regime.value}"] += 1
            for switch in cycle.switches:
                self._fleet.workers[switch.worker_id].set_role(switch.role)
                group.roles.carried_out(switch)
                self._reasons[f"switch: {switch.reason.value}"] += 1

    def _read(
        self, roles: RoleLoop, workers: list[SimWorker], waiting: Waiting
    ) -> list[WorkerReading]:
        num_prefill = max(sum(w.info.role is Role.PREFILL for w in workers), 1)
        num_decode = max(len(workers) - num_prefill, 1)
        share = Waiting(waiting.prefill / num_prefill, waiting.decode / num_decode)
        return [
            roles.read(
                each.info,
                reported_load(each),
                # A queue of its own waits for nobody else.
                Waiting(share.prefill + each.num_waiting, share.decode),
            )
            for each in workers
        ]

    # --- reallocation ------------------------------------------------------------------------

    def reallocate(self) -> None:
        """Runs one step of the slow loop."""
        local = self._local()
        decoding = sum(worker.info.role is not Role.PREFILL for worker in local)
        queues = self._allocation.take_queues(len(local) - decoding, decoding)
        is_helping = any(group.roles.is_helping for group in self._groups.values())
        if not self._allocation.has_lengths or is_helping:
            return
        hardware = self._hardware(self._offload.take_capacity())
        num_prefill = sum(worker.info.role is Role.PREFILL for worker in local)
        loads = [(worker.info, worker.load()) for worker in local]
        question = self._allocation.question(
            self._serving(), hardware, self._offload.threshold, loads, queues
        )
        if not question.is_open(switch_roles=self._scenario.system.switch_roles):
            return
        found = question.answer()
        move = found.move
        self._reasons[f"reallocation: {move.reason.value}"] += 1
        if move.to_role is not None and self._turn_one(move.to_role, local):
            num_prefill += 1 if move.to_role is Role.PREFILL else -1
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

    def _observe_stages(self) -> None:
        for label, group in self._groups.items():
            members, waiting = self._movable(label), self._waiting(label)
            queued = sum(worker.num_waiting for worker in members)
            counts = StageCounts.of(
                Waiting(waiting.prefill + queued, waiting.decode), map(reported_load, members)
            )
            group.monitor.observe(counts, group.num_new, CYCLE_S)
            group.num_new = 0

    def _move_ratios(self) -> None:
        for label, group in self._groups.items():
            self._move_ratio(self._movable(label), group.monitor)

    def _move_ratio(self, movable: list[SimWorker], monitor: RatioMonitor) -> None:
        num_prefill = sum(worker.info.role is Role.PREFILL for worker in movable)
        profile = _profile_of(movable[0], monitor.lengths) if movable else None
        step = monitor.end_window(num_prefill, len(movable) - num_prefill, profile)
        if step is None:
            return
        self._reasons[f"monitor: {step.reason.value}"] += 1
        turned = [
            step.grow is not None and self._turn_one(step.grow, movable) for _ in range(step.count)
        ]
        if any(turned):
            monitor.carried_out()

    def _turn_one(self, role: Role, workers: list[SimWorker]) -> bool:
        giver = choose_giver([(each.info, each.load()) for each in workers], role)
        if giver is None:
            return False
        self._fleet.workers[giver].set_role(role)
        return True

    # --- inputs of the policies --------------------------------------------------------------

    def _waiting(self, label: str | None = None) -> Waiting:
        """Returns the requests that wait for all groups, or a group's share of them."""
        shares: dict[str, float] = {}  # the group's, by scenario
        held = unheld = 0.0
        for request, each in self._desk.searching.items():
            scenario = request.trace.scenario
            if scenario not in shares:
                shares[scenario] = 1.0 if label is None else self._share(scenario, label)
            if each.has_reservation:
                held += shares[scenario]
            else:
                unheld += shares[scenario]
        members = self._local() if label is None else self._movable(label)
        return split_waiting(held, unheld, [worker.load() for worker in members])

    def _share(self, scenario: str, label: str) -> float:
        """Returns the fraction of a scenario's requests that a group serves."""
        keys = {each: GroupKey(MODEL, "", each, "") for each in self._groups}
        sizes = {key: len(self._movable(each)) for each, key in keys.items()}
        present = {key: size for key, size in sizes.items() if size}
        return shares_of_groups({scenario: 1.0}, present).get(keys[label], 0.0)

    def _movable(self, label: str) -> list[SimWorker]:
        """Returns a group's workers that can change their role."""
        return [
            worker
            for worker in self._local()
            if worker.info.scenario == label and worker.info.role is not Role.HYBRID
        ]

    def _remote(self) -> list[SimWorker]:
        return [w for w in self._fleet.living() if w.info.cluster == REMOTE]

    def _local(self) -> list[SimWorker]:
        return [w for w in self._fleet.living() if w.info.cluster != REMOTE]

    def _serving(self) -> ServingProfile:
        return self._scenario.profile.serving

    def _hardware(self, egress_bytes_per_s: float) -> Hardware:
        return Hardware(len(self._remote()), len(self._local()), egress_bytes_per_s)


def _profile_of(worker: SimWorker, lengths: MeanLengths | None) -> InstanceProfile | None:
    """Returns the speeds that a scheduler would measure; all workers at home have one device."""
    if lengths is None:
        return None
    device, info = worker.device, worker.info
    slots, cost = info.decode_slots, device.decode
    pace = StepPace(cost.constant + cost.per_sequence * slots, cost.per_token)
    room = info.num_blocks * TRACE_BLOCK
    return measured_profile(device.prefill_s(lengths.uncached), pace, slots, room, lengths)


def reported_load(worker: SimWorker) -> WorkerLoad:
    """Returns the load that a live worker in this state reports: without a queue of its own.

    It models a real engine's measurements: prompts keep a worker busy, and decode steps do in
    proportion to the slots in use.
    """
    info, load = worker.info, worker.load()
    accepted = load.prefill_active - worker.num_waiting
    is_computing = accepted > load.prefill_sending
    return changed(
        load,
        prefill_active=accepted,
        budget_used=float(is_computing),
        compute_used=float(is_computing),
        memory_bandwidth_used=load.decode_running / max(decode_slots(info, load), 1),
    )
