"""Runs a scenario in virtual time: requests arrive, are placed, prefilled, handed off and decoded.

Decisions and bookkeeping are the services' own code; only step times and links are modelled.
Tests: tests/unit/sim/test_simulation.py.
"""

from __future__ import annotations

import dataclasses
import gc
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from kvmesh.core.types import PrefixSource, Refusal, RefusalReason, Role, RoutePlan, WorkerId
from kvmesh.policy.connections import Connections
from kvmesh.policy.fleet_index import FleetIndex
from kvmesh.policy.global_lru import PoolEviction
from kvmesh.policy.pdserve import timeout_s
from kvmesh.sim.chains import Chains
from kvmesh.sim.control import Control
from kvmesh.sim.events import EventQueue
from kvmesh.sim.eviction import FleetEviction
from kvmesh.sim.fetch import Fetches
from kvmesh.sim.fleet import SimFleet
from kvmesh.sim.gaps import Gaps
from kvmesh.sim.placing import Desk, Placed, Placing
from kvmesh.sim.requests import Outcome, SimRequest, SimSequence, blocks_for
from kvmesh.sim.router import Decide, SimRouter
from kvmesh.sim.scenario import (
    Failure,
    FailureKind,
    Scenario,
    accepted_itl_s,
    accepted_tpot_s,
)
from kvmesh.sim.systems import Deadlines, System
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest
from kvmesh.sim.turns import Lanes
from kvmesh.sim.worker import SimWorker
from kvmesh.sim.worker_rules import WorkerRules


@dataclass(eq=False, slots=True)
class _Handoff:
    """A request's KV transfer from prefill to decode.

    Attributes:
        sent_blocks: number of the prompt's blocks sent so far, including those cached at the decode
            worker.
        write_id: id of the transfer in progress; None: there is none.
    """

    placed: Placed
    sent_blocks: int
    write_id: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment of the timelines.

    Attributes:
        computed_tokens: prompt tokens computed since the last sample by each live worker that
            prefills.
        link_use: utilisation of the link out of the remote cluster since the last sample, 0..1.
        roles: number of live workers by role.
        searching: number of requests that look for workers.
    """

    at_s: float
    computed_tokens: dict[WorkerId, int]
    link_use: float
    roles: dict[str, int]
    searching: int
    threshold_tokens: float


@dataclass(slots=True)
class Result:
    """Results of a scenario.

    Attributes:
        reasons: number of decisions for each reason.
        finished_s: virtual time of the end.
        gaps: times between tokens, from the workers that exist at the end.
    """

    scenario: Scenario
    requests: list[SimRequest]
    samples: list[Sample] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    finished_s: float = 0.0
    num_events: int = 0
    link_bytes: float = 0.0
    gaps: Gaps = field(default_factory=Gaps)


def simulate(scenario: Scenario, ended: Callable[[float], object] | None = None) -> Result:
    """Runs a scenario to the end of its last request; equal scenarios give equal results.

    Args:
        ended: called with the virtual time when a request has its outcome.

    Raises:
        ConfigError: the fleet does not fit the profile.
    """
    return Simulation(scenario, ended).run()


def _index(system: System, rng: random.Random) -> FleetIndex | None:
    if not system.is_indexed:
        return None
    return FleetIndex(rng, by_tokens=system.route.first_token is not None)


def _eviction(scenario: Scenario, events: EventQueue, fleet: SimFleet) -> FleetEviction | None:
    is_global = scenario.eviction is PoolEviction.GLOBAL
    return FleetEviction(events, fleet) if is_global else None


class Simulation:
    """The parts of one run, and the path of a request through them (`WorkerListener`).

    Args:
        around: wraps the decisions about single requests, for example to time them.
    """

    def __init__(
        self,
        scenario: Scenario,
        ended: Callable[[float], object] | None = None,
        around: Callable[[Decide], RoutePlan | Refusal] | None = None,
    ) -> None:
        self.scenario = scenario
        self._ended, self.events = ended, EventQueue()
        self.rng = random.Random(scenario.seed)
        system = scenario.system
        self.fleet = SimFleet(
            self.events,
            scenario.profile,
            self,
            WorkerRules(
                system.queue_offers,
                scenario.chunks,
                accepted_tpot_s(scenario),
                accepted_itl_s(scenario),
                scenario.chains,
                scenario.tiers,
            ),
            report_interval_s=system.report_interval_s,
            order=_index(system, self.rng),
            grouped=system.grouped,
        )
        self.fleet.build(scenario.fleet)
        self._longest_tokens = min((w.max_tokens for w in self.fleet.living()), default=1)
        self.result = Result(scenario, [])
        self._num_open, self._link_seen = 0, 0.0
        self._sessions: dict[str, deque[TraceRequest]] = {}
        self._handoffs: dict[SimSequence, _Handoff] = {}
        self._placements: dict[SimRequest, Placed] = {}
        self.fetches = Fetches(self.events, self.fleet, scenario.profile, self._stretch)
        self.chains = Chains(self.events, self.fleet, scenario.profile, self.fetches.begin)
        self.eviction = _eviction(scenario, self.events, self.fleet)
        reasons = self.result.reasons
        note = None if self.eviction is None else self.eviction.note
        self._router = SimRouter(
            scenario, self.events, self.fleet, lambda: self.control.offload, reasons, around, note
        )
        self._desk = Desk(
            self.events,
            self.rng,
            self.fleet,
            self._router.ask,
            self._placed,
            self._refused,
            {},
            Connections(fills=not system.queue_offers),
            self._bring,
            Lanes({worker.info.scenario for worker in self.fleet.workers.values()}),
            system.deadlines,
            system.by_connections,
            planned=self._planned,
        )
        self.control = Control(scenario, self.events, self.fleet, self._desk, reasons)
        self._computed: dict[WorkerId, int] = {}

    def run(self) -> Result:
        """Runs events until every request has an outcome."""
        first = sorted(self._first_arrivals(), key=lambda trace: trace.arrival_s)
        self._num_open = len(first)
        self.events.feed((trace.arrival_s, partial(self._arrive, trace)) for trace in first)
        for failure in self.scenario.failures:
            self.events.at(failure.at_s, partial(self._fail, failure))
        self.control.start()
        if self.eviction is not None:
            self.eviction.start()
        self.events.after(self.scenario.sample_s, self._sample)
        # A run makes many objects and no cycles; garbage collection would take a fifth of its time.
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            self.events.run(lambda: self._num_open == 0)
        finally:
            if was_collecting:
                gc.enable()
        self.result.finished_s = self.events.now()
        self.result.num_events = self.events.num_events
        self.result.link_bytes = self.fleet.between.use_until_now()[0]
        for worker in self.fleet.workers.values():
            self.result.gaps.merge(worker.steps.gaps)
        return self.result

    # --- arrivals ----------------------------------------------------------------------------

    def _first_arrivals(self) -> Iterator[TraceRequest]:
        for trace in self.scenario.requests:
            if not self.scenario.closed_loop or not trace.session:
                yield trace
            elif trace.session in self._sessions:
                self._sessions[trace.session].append(trace)
            else:
                self._sessions[trace.session] = deque()
                yield trace

    def _arrive(self, trace: TraceRequest) -> None:
        # An answer ends where the longest sequence does, as engines end it.
        room = max(self._longest_tokens - trace.input_tokens, 1)
        if trace.output_tokens > room:
            trace = dataclasses.replace(trace, output_tokens=room)
        limit = timeout_s(trace.input_tokens, self.scenario.objectives.timeouts)
        request = SimRequest.from_trace(len(self.result.requests), trace, self.events.now(), limit)
        self.result.requests.append(request)
        if self.fleet.host is not None:
            self.fleet.host.note_request(trace.input_tokens)
        turns = self._desk.lanes.of(request)
        if self._desk.deadlines is Deadlines.ADMISSION and turns.is_hopeless(request):
            self._refused(request, RefusalReason.BUSY, turns.retry_after_s)
            return
        # One message to the scheduler and one to the workers.
        self.events.after(2 * self.fleet.message_s, Placing(self._desk, request, frozenset()).start)

    def _bring(self, worker: SimWorker, sequence: SimSequence, source: PrefixSource) -> None:
        way = self.chains if source.computes else self.fetches
        way.begin(worker, sequence, source)

    # --- the path of a request ---------------------------------------------------------------

    def _placed(self, placed: Placed) -> None:
        request = placed.request
        request.placed_s = self.events.now()
        request.prefill_on = placed.prefill_worker.info.worker_id
        request.decode_on = placed.decode_worker.info.worker_id
        self._placements[request] = placed
        if placed.prefill is not placed.decode:
            self._handoffs[placed.prefill] = _Handoff(placed, 0)
        if self.scenario.system.queue_offers:
            # A worker's queue gives up a prompt when a gateway would.
            self.events.at(self._useless_s(placed), partial(self._give_up, placed))

    def _useless_s(self, placed: Placed) -> float:
        """Returns the time from which it is no use to begin a prompt that a worker has queued."""
        request, worker = placed.request, placed.prefill_worker
        if self._desk.deadlines is Deadlines.TIMEOUT:
            return request.deadline_s
        cached = len(worker.pool.match(request.reusable_hashes)) * TRACE_BLOCK
        prompt_s = worker.device.chunk_s(cached, request.num_tokens, is_first=True)
        return max(request.deadline_s - prompt_s, self.events.now())

    def _give_up(self, placed: Placed) -> None:
        """Ends a request if none of its prompt is computed yet."""
        prefill, request = placed.prefill, placed.request
        if prefill.gone or prefill.has_first or prefill.num_computed > prefill.num_cached:
            return
        del self._placements[request]
        self._hang_up(placed)
        self._release(placed)
        self._refused(request, RefusalReason.DEADLINE)

    def _planned(self, request: SimRequest, plan: RoutePlan) -> None:
        self.control.note_prompt(request, plan)

    def on_change(self, worker: SimWorker) -> None:
        """See `WorkerListener`."""
        self.fleet.note_change(worker)

    def on_opening(self) -> None:
        """See `WorkerListener`."""
        self.fleet.openings += 1

    def on_chunk(self, worker: SimWorker, sequence: SimSequence) -> None:
        """See `WorkerListener`; one transfer at a time carries all blocks computed by then."""
        handoff = self._handoffs[sequence]
        if handoff.write_id is not None:
            return
        placed = handoff.placed
        num_cached = placed.decode.num_cached // TRACE_BLOCK
        begin = max(handoff.sent_blocks, num_cached)
        # The first token's own KV is not part of the prompt.
        end = (
            blocks_for(placed.request.num_tokens)
            if sequence.has_first
            else sequence.num_computed // TRACE_BLOCK
        )
        if end <= begin:
            return
        handoff.write_id = placed.decode_worker.begin_write(
            placed.decode, begin - num_cached, end - begin
        )
        handoff.sent_blocks = end
        size = self._kv_bytes(begin, end) * self._stretch()
        link = self.fleet.link(worker, placed.decode_worker)
        worker.begin_sending(end - begin)
        link.send(size, partial(self._left, worker, handoff, end - begin))

    def _left(self, worker: SimWorker, handoff: _Handoff, num_blocks: int) -> None:
        worker.end_sending(num_blocks)
        self.events.after(self.fleet.message_s, partial(self._arrived, handoff))

    def _stretch(self) -> float:
        return 1 + self.scenario.jitter * self.rng.random()

    def _kv_bytes(self, begin: int, end: int) -> float:
        kv_bytes = self.scenario.profile.kv_bytes
        before = kv_bytes(begin * TRACE_BLOCK) if begin else 0.0
        return max(kv_bytes(end * TRACE_BLOCK) - before, 0.0)

    def _arrived(self, handoff: _Handoff) -> None:
        placed = handoff.placed
        assert handoff.write_id is not None, "nothing was on its way"
        write_id, handoff.write_id = handoff.write_id, None
        if placed.decode_worker.alive:
            placed.decode_worker.end_write(write_id, ok=not placed.decode.gone)
        if placed.decode.gone or placed.prefill.gone:
            return
        if handoff.sent_blocks < blocks_for(placed.request.num_tokens):
            self.on_chunk(placed.prefill_worker, placed.prefill)
            return
        del self._handoffs[placed.prefill]
        placed.prefill_worker.release(placed.prefill)
        placed.decode_worker.start_decode(placed.decode)
        if placed.decode.left <= 0:
            placed.decode_worker.finished(placed.decode)

    def on_first_token(self, worker: SimWorker, sequence: SimSequence) -> None:
        """See `WorkerListener`."""
        request = sequence.request
        request.has_first = True
        assert request.placed_s is not None, "a worker has the prompt"
        took_s = self.events.now() - request.placed_s
        self._desk.lanes.of(request).prefill_times.note(request.num_tokens, took_s)
        if request.attempt == 0:
            request.cached_tokens = sequence.num_cached
        if request.first_token_s is None:
            request.first_token_s = self.events.now() + self.fleet.message_s
        placed = self._placements[request]
        if request.remaining_tokens <= 1 and placed.prefill is not placed.decode:
            # The first token is the last: no KV needs to move.
            self._handoffs.pop(sequence, None)
            placed.decode_worker.release(placed.decode)
            worker.release(sequence)
            self._finish(request)

    def on_finished(self, worker: SimWorker, sequence: SimSequence) -> None:
        """See `WorkerListener`."""
        self._finish(sequence.request)

    def _finish(self, request: SimRequest) -> None:
        self._hang_up(self._placements.pop(request, None))
        request.finished_s = self.events.now() + self.fleet.message_s
        assert request.first_token_s is not None, "finished without a token"
        late = request.first_token_s > request.deadline_s and request.attempt == 0
        self._end(request, Outcome.LATE if late else Outcome.DONE)

    def _hang_up(self, placed: Placed | None) -> None:
        if placed is not None:
            self._desk.connections.ended(placed.prefill_worker.info.worker_id)

    def _refused(
        self, request: SimRequest, reason: RefusalReason, retry_after_s: float = 0.0
    ) -> None:
        request.refusal = reason
        request.finished_s = self.events.now()
        self._end(request, Outcome.REFUSED, retry_after_s)

    def _end(self, request: SimRequest, outcome: Outcome, retry_after_s: float = 0.0) -> None:
        request.outcome = outcome
        self._num_open -= 1
        if self._ended is not None:
            self._ended(self.events.now())
        turns = self._sessions.get(request.trace.session)
        if turns:
            trace = turns.popleft()
            self._num_open += 1
            self.events.after(retry_after_s + trace.think_s, partial(self._arrive, trace))

    # --- failures ----------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> None:
        if failure.kind is FailureKind.LINK:
            links = self.scenario.profile.links
            self.fleet.between.set_bandwidth(links.between_bytes_per_s * failure.factor)
            self._router.measure_links()
            return
        names = list(self.fleet.workers)
        if failure.index >= len(names):
            return
        worker = self.fleet.workers[names[failure.index]]
        if failure.kind is FailureKind.RESTART:
            self.fleet.restart(names[failure.index])
        elif worker.alive:
            lost = worker.fail()
            self.fleet.forget(worker)
            for request in dict.fromkeys(sequence.request for sequence in lost):
                if request in self._placements:
                    self._move(request, worker)

    def _move(self, request: SimRequest, dead: SimWorker) -> None:
        """Places a request again: its prompt and tokens so far are prefilled on other workers."""
        placed = self._placements.pop(request)
        self._hang_up(placed)
        self._release(placed)
        received = request.trace.output_tokens - placed.decode.left
        request.generated = max(received, request.generated + request.has_first)
        request.has_first = False
        request.attempt += 1
        if request.remaining_tokens <= 0:
            self._finish(request)
            return
        if request.generated:  # its client is already reading, so it waits anew
            limit = timeout_s(request.num_tokens, self.scenario.objectives.timeouts)
            request.deadline_s = self.events.now() + limit
        Placing(self._desk, request, frozenset({dead.info.worker_id})).start()

    def _release(self, placed: Placed) -> None:
        self._handoffs.pop(placed.prefill, None)
        for worker, sequence in (
            (placed.prefill_worker, placed.prefill),
            (placed.decode_worker, placed.decode),
        ):
            if worker.alive:
                worker.release(sequence)

    # --- timelines ---------------------------------------------------------------------------

    def _sample(self) -> None:
        computed: dict[WorkerId, int] = {}
        for worker in self.fleet.living():
            name, total = worker.info.worker_id, worker.steps.computed_tokens
            if worker.info.role is not Role.DECODE:
                computed[name] = max(total - self._computed.get(name, 0), 0)
            self._computed[name] = total
        carried, _ = self.fleet.between.use_until_now()
        capacity = self.fleet.between.bytes_per_s * self.scenario.sample_s
        roles = Counter(worker.info.role.value for worker in self.fleet.living())
        self.result.samples.append(
            Sample(
                at_s=self.events.now(),
                computed_tokens=computed,
                link_use=min((carried - self._link_seen) / capacity, 1.0),
                roles=dict(roles),
                searching=len(self._desk.searching),
                threshold_tokens=self.control.threshold_tokens,
            )
        )
        self._link_seen = carried
        self.events.after(self.scenario.sample_s, self._sample)
