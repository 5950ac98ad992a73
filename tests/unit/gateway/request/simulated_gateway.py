"""The live gateway's search for workers inside a simulation, in place of the simulator's own.

The gateway's code runs in an asyncio loop whose time is the simulation's. Its attempts ask
simulated workers, and its scheduler is the simulator's router. So only the search, its turns, its
estimates and its refusals differ between a run with it and one without.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from kvmesh.core.details import FleetWorker
from kvmesh.core.types import (
    BlockHash,
    Candidate,
    PrefixSource,
    Refusal,
    RoutePlan,
    RouteQuery,
    SamplingParams,
    WorkerId,
)
from kvmesh.kv.hashing import packed_tokens
from kvmesh.policy.prefill_times import PrefillTimes
from kvmesh.policy.waiting import Looking, looking
from kvmesh.sim.events import EventQueue
from kvmesh.sim.fleet import MODEL
from kvmesh.sim.placing import Desk, Placed
from kvmesh.sim.requests import SimRequest, SimSequence
from kvmesh.sim.simulation import Simulation
from kvmesh.sim.worker import SimWorker
from services.gateway.config import LimitsConfig
from services.gateway.errors import Stage, StageRefusedError
from services.gateway.frontend import Frontend
from services.gateway.metrics import GatewayMetrics
from services.gateway.request import actions as act
from services.gateway.request.actions import Actions, Kind, Limits, Side
from services.gateway.request.attempt import Attempt
from services.gateway.request.choice import Caller
from services.gateway.request.lanes import Lane
from services.gateway.request.ledger import Ledger
from services.gateway.request.mesh import GenerationRequest, Mesh
from services.gateway.request.routing import Router
from services.gateway.request.search import Search

PATIENCE_S = 1e9
"""Seconds of all limits that are not compared."""

LEASE_MS = 10**12


class VirtualLoop(asyncio.AbstractEventLoop):
    """An asyncio loop that runs its callbacks as events of a simulation."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events

    def time(self) -> float:
        return self._events.now()

    def get_debug(self) -> bool:
        return False

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time(), callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._events.at(when, partial(self.run, handle))
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **_: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        return asyncio.Task(coro, loop=self)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise AssertionError(context)

    def _timer_handle_cancelled(self, _handle: asyncio.TimerHandle) -> None:
        """Called by handles; the event then does nothing."""

    def run(self, handle: asyncio.TimerHandle) -> None:
        """Runs a callback as asyncio does."""
        if not handle.cancelled():
            with self.running():
                handle._run()

    @contextmanager
    def running(self) -> Iterator[None]:
        """While this context is open, it is the running loop."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(before)


class _Sessions:
    """Workers that answer at once."""

    def unanswered(self) -> frozenset[WorkerId]:
        return frozenset()

    def late_last(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return candidates


class SimulatedGateway:
    """The live gateway of a run; `simulation.Lanes` and `simulation.Placing` are made of it.

    Attributes:
        queries: what the scheduler was asked.
    """

    def __init__(self) -> None:
        self.queries: list[RouteQuery] = []
        self._names: dict[str, tuple[Desk, SimRequest]] = {}
        self._planned: set[SimRequest] = set()

    def open(self, run: Simulation) -> None:
        """Begins to serve a simulation."""
        self.loop = VirtualLoop(run.events)  # type: ignore[abstract]
        self._run = run
        limits = LimitsConfig(request_timeout_s=PATIENCE_S)
        metrics = GatewayMetrics()
        router = Router(MODEL, self, self, dict, PATIENCE_S)
        with self.loop.running():
            self.mesh = Mesh(
                router,
                cast("Any", _Sessions()),
                metrics,
                metrics.of(MODEL),
                limits,
                run.rng,
                connections=run._desk.connections,
            )
        self._frontend = Frontend(self.mesh, cast("Any", None), (MODEL,))
        load = {name: worker.load() for name, worker in run.fleet.workers.items()}
        self.workers = tuple(
            FleetWorker(worker.info, load[name]) for name, worker in run.fleet.workers.items()
        )

    # --- as the simulator's `Lanes`, for arrivals ---

    def of(self, request: SimRequest) -> Entry:
        """The group's lane as a new request meets it."""
        served = self.mesh.router.served(request.trace.scenario, 0.0)
        assert served is not None, "all workers are known"
        return Entry(self._frontend, self.mesh.lanes.of(served.group), self.loop)

    # --- as the gateway's `RouteSource` ---

    async def route(
        self, query: RouteQuery, _traceparent: str, _timeout_s: float
    ) -> RoutePlan | Refusal:
        """The simulator's plan."""
        self.queries.append(query)
        desk, request = self._names[query.request_id]
        answered: asyncio.Future[RoutePlan | Refusal] = self.loop.create_future()
        desk.route(request, query.avoid, answered.set_result)
        plan = await answered
        if isinstance(plan, RoutePlan) and not request.attempt and request not in self._planned:
            self._planned.add(request)
            desk.planned(request, plan)
        return plan

    # --- as `waiting_by_scenario`, for the loops ---

    def told(self, _searching: object) -> dict[str, Looking]:
        """What the next query of each scenario tells the scheduler."""
        found: dict[str, Looking] = {}
        for scenario, each in self.mesh.lanes._waiting.items():
            told = looking(
                each.paused, each.paused_reserved, each.queued, each.planned, each.remote
            )
            if told != Looking():
                found[scenario] = told
        return found

    # --- as the simulator's `Placing` ---

    def placing(self, desk: Desk, request: SimRequest, avoid: frozenset[WorkerId]) -> LivePlacing:
        """One request's search."""
        self._names[request.request_id] = desk, request
        return LivePlacing(self, desk, request, avoid)


@dataclass(frozen=True)
class Entry:
    """The checks of a new request; as the simulator's `Turns`."""

    frontend: Frontend
    lane: Lane
    loop: VirtualLoop

    @property
    def prefill_times(self) -> PrefillTimes:
        return self.lane.prefill_times

    def is_hopeless(self, request: SimRequest) -> bool:
        limit_ms = round(1000 * (request.deadline_s - request.arrival_s))
        caller = Caller(request.arrival_s, scenario=request.trace.scenario, ttft_ms=limit_ms)
        try:
            self.frontend._check_crowd(caller, 1)
        except StageRefusedError:
            return True
        return False

    @property
    def retry_after_s(self) -> float:
        return self.lane.crowd.wait_s("")


class LivePlacing:
    """One request's live search, and its attempt; as the simulator's `Placing`."""

    def __init__(
        self, gateway: SimulatedGateway, desk: Desk, request: SimRequest, avoid: frozenset[WorkerId]
    ) -> None:
        self._gateway = gateway
        self._desk = desk
        self._sim = request
        self._avoid = avoid
        self._reserved: tuple[SimWorker, SimSequence] | None = None
        self._answer: asyncio.Future[bool] | None = None
        self._accepted: tuple[SimWorker, SimSequence, PrefixSource | None]

    def start(self) -> None:
        """Starts the search."""
        self._desk.searching[self._sim] = cast("Any", self)
        loop = self._gateway.loop
        with loop.running():
            self._open()
            loop.create_task(self._find())

    def _open(self) -> None:
        gateway, request = self._gateway, self._sim
        prompt = (7,) * request.trace.input_tokens
        served = gateway.mesh.router.served(request.trace.scenario, 0.0)
        assert served is not None, "all workers are known"
        asked = GenerationRequest(
            request.request_id,
            MODEL,
            prompt,
            packed_tokens(prompt),
            SamplingParams(max_tokens=request.remaining_tokens),
            request.arrival_s,
            request.deadline_s - request.arrival_s,
            scenario=request.trace.scenario,
        )
        self.ledger = Ledger(gateway.mesh, asked, None, request.arrival_s)
        limits = Limits(PATIENCE_S, PATIENCE_S, PATIENCE_S)
        self._attempt = Attempt(request.num_tokens, limits, math.inf, itertools.count(1))
        self.search = Search(
            gateway.mesh,
            self.ledger,
            self,
            (7,) * request.num_tokens,
            again_until=request.deadline_s if request.generated else None,
            avoid=self._avoid,
            fingerprint=served.group.fingerprint,
        )

    async def _find(self) -> None:
        try:
            await self.search.run()
        except StageRefusedError as error:
            self._desk.searching.pop(self._sim, None)
            self._perform(self._attempt.cancel())
            self.ledger.close(0, self._desk.events.now())
            self._desk.refused(self._sim, error.refusal.reason)

    # --- as the search's `Asker` ---

    @property
    def holds(self) -> bool:
        return self._attempt.holds

    @property
    def has_reservation(self) -> bool:
        return self._attempt.holds

    def ask(self, prefill: Sequence[Candidate], decode: Sequence[Candidate], until: float) -> None:
        self._answer = self._gateway.loop.create_future()
        self._perform(self._attempt.ask(prefill, decode, until, self._desk.events.now()))

    async def answer(self) -> bool:
        assert self._answer is not None, "workers were asked"
        return await self._answer

    def prefetch(self, candidate: Candidate, hashes: Sequence[BlockHash]) -> None:
        """Simulated workers load when they begin."""

    # --- the attempt's actions ---

    def _perform(self, actions: Actions) -> None:
        left = deque(actions)
        while left:
            left.extendleft(reversed(self._do(left.popleft())))

    def _do(self, action: act.Action) -> Actions:
        now = self._desk.events.now()
        match action:
            case act.Ask(kind=Kind.RESERVE):
                return self._reserve(action, now)
            case act.Ask(kind=Kind.OFFER):
                return self._offer(action, now)
            case act.Ask(kind=Kind.START):
                return self._start_one(action, now)
            case act.Refuse(side, refusal, worker_id):
                stage = Stage.PREFILL if side is Side.PREFILL else Stage.DECODE
                self.search.refused(stage, refusal, worker_id)
            case act.Cancel(side=Side.DECODE):
                self._drop()
            case act.Taken():
                self.ledger.taken(action, now)
                self._placed()
            case act.Exhausted():
                assert self._answer is not None, "workers were asked"
                self._answer.set_result(False)
            case act.Hold() | act.Cancel():
                pass
            case _:
                raise AssertionError(f"no search does {action}")
        return ()

    def _reserve(self, ask: act.Ask, now: float) -> Actions:
        worker = self._desk.fleet.workers[ask.worker_id]
        outcome = worker.reserve(self._sim)
        if isinstance(outcome, Refusal):
            return self._attempt.ended(ask.number, Side.DECODE, outcome, now)
        self._reserved = worker, outcome
        return self._attempt.reserved(ask.number, LEASE_MS, now)

    def _offer(self, ask: act.Ask, now: float) -> Actions:
        refusal = self._offered(ask)
        if refusal is not None:
            return self._attempt.ended(ask.number, Side.PREFILL, refusal, now)
        return self._attempt.accepted(ask.number, now)

    def _start_one(self, ask: act.Ask, now: float) -> Actions:
        worker = self._desk.fleet.workers[ask.worker_id]
        outcome = worker.reserve(self._sim)
        if isinstance(outcome, Refusal):
            return self._attempt.ended(ask.number, Side.DECODE, outcome, now)
        self._reserved = worker, outcome
        refusal = self._offered(ask)
        if refusal is not None:
            return self._attempt.ended(ask.number, Side.PREFILL, refusal, now)
        return self._attempt.reserved(ask.number, LEASE_MS, now, starts=True)

    def _offered(self, ask: act.Ask) -> Refusal | None:
        assert self._reserved is not None, "a prompt is offered with a reservation"
        held, worker = self._reserved[1], self._desk.fleet.workers[ask.worker_id]
        outcome = worker.offer(self._sim, held, held=ask.candidate.source is not None)
        if isinstance(outcome, Refusal):
            return outcome
        self._accepted = worker, outcome, ask.candidate.source
        return None

    def _placed(self) -> None:
        assert self._reserved is not None, "the decode worker holds blocks"
        assert self._answer is not None, "workers were asked"
        worker, sequence, source = self._accepted
        self._desk.searching.pop(self._sim, None)
        self._desk.placed(Placed(self._sim, *self._reserved, worker, sequence))
        if source is not None:
            self._desk.fetch(worker, sequence, source)
        self._answer.set_result(True)

    def _drop(self) -> None:
        if self._reserved is not None:
            worker, sequence = self._reserved
            worker.release(sequence)
            self._reserved = None
