"""Finding a decode worker that reserves and a prefill worker that accepts.

Asks again and again until the deadline, then refuses once, with the last reason it was told.
Waiting for capacity happens here and nowhere else.
Tests: tests/integration/test_gateway_refusals.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvmesh.console.request_log import Moment
from kvmesh.core.errors import InvalidRequestError
from kvmesh.core.types import (
    BlockHash,
    Candidate,
    Placement,
    Refusal,
    RefusalReason,
    RoutePlan,
    RouteQuery,
    SequenceSpec,
    WorkerId,
)
from kvmesh.core.values import changed
from kvmesh.kv.hashing import chain_hashes, root_hash
from kvmesh.policy.connections import BY_CONNECTIONS
from kvmesh.policy.fair_share import Claim
from kvmesh.policy.forwarding import (
    REROUTE_AFTER_S,
    backoff_s,
    rounds_per_route,
    waiting_told,
)
from kvmesh.rpc.convert import sequence_spec_to_proto
from kvmesh.telemetry.tracing import Span, start_span
from kvmesh.v1 import types_pb2
from services.gateway.errors import Stage
from services.gateway.generation import FirstTry
from services.gateway.mesh import GenerationRequest, Mesh, Placed
from services.gateway.open_work import OpenWork, ReservationLostError
from services.gateway.refusals import NEVER, Refusals
from services.gateway.routing import ModelFacts
from services.gateway.turnstile import Turn
from services.gateway.worker_events import Refused

ShowPrompt = Callable[
    [Candidate, types_pb2.SequenceSpec, str, int, float], Awaitable[Refused | None]
]
"""`OpenWork.start` or `OpenWork.offer`."""


@dataclass(frozen=True)
class _Sequence:
    """What workers are asked to work on; made once, since it may be long and is sent often."""

    facts: ModelFacts
    spec: SequenceSpec
    message: types_pb2.SequenceSpec

    @cached_property
    def block_hashes(self) -> tuple[BlockHash, ...]:
        """Of its full blocks; only a scheduler that is asked looks at them."""
        return tuple(chain_hashes(self.spec.root_hash, self.spec.token_ids, self.facts.block_size))


def _sequence(
    request: GenerationRequest, token_ids: tuple[int, ...], facts: ModelFacts
) -> _Sequence:
    root = root_hash(facts.fingerprint, cache_salt=request.cache_salt)
    spec = SequenceSpec(token_ids, len(request.prompt_ids), request.sampling, root)
    return _Sequence(facts, spec, sequence_spec_to_proto(spec))


def _budget_ms(remaining_s: float) -> int:
    return max(1, round(remaining_s * 1000))


class Placing:
    """One search for workers.

    Args:
        token_ids: prompt and the tokens generated before.
        deadline: says when it has to end, on the loop's clock; that may change while it waits.
        avoid: workers that lost this request before.
        first_try: what was tried before this search.
    """

    def __init__(
        self,
        mesh: Mesh,
        work: OpenWork,
        request: GenerationRequest,
        *,
        token_ids: tuple[int, ...],
        deadline: Callable[[], float],
        avoid: frozenset[WorkerId],
        first_try: FirstTry | None = None,
    ) -> None:
        self._mesh = mesh
        self._work = work
        self._request = request
        self._token_ids = token_ids
        self._deadline_now = deadline
        self._deadline = deadline()
        self._failed = avoid
        self._num_rounds = 0
        last = None if first_try is None else first_try.last
        self._num_offers = int(last is not None and last.stage is Stage.PREFILL)
        self._spans: dict[str, Span] = {}
        self._sequence: _Sequence | None = None
        self._trace = mesh.log.trace(request.request_id)
        self._now = asyncio.get_running_loop().time
        self._tried = first_try
        self._refusals = Refusals(first_try, self._now())

    async def run(self) -> Placed:
        """Searches until the deadline.

        Raises:
            StageRefusedError: nobody took the request in time.
            InvalidRequestError: no worker can ever take it.
        """
        crowd, tenant = self._mesh.crowd, self._request.tenant.name
        crowd.enter(tenant)
        self._mesh.waiting.count += 1
        placed: Placed | None = None
        try:
            with self._mesh.turns.enter(self._claim()) as turn:
                placed = await self._search(turn)
            return placed
        finally:
            self._mesh.waiting.count -= 1
            crowd.leave(tenant, self._now(), placed=placed is not None)
            for span in self._spans.values():
                span.end()

    def _claim(self) -> Claim | None:
        """What it asks of the shares; a client that is reading already waits for nobody."""
        request = self._request
        if len(self._token_ids) > len(request.prompt_ids):
            return None
        tenant = request.tenant
        limits = tenant.limits
        num_tokens = len(self._token_ids)
        return Claim(tenant.name, num_tokens, limits.weight, limits.priority, request.rank)

    async def _search(self, turn: Turn) -> Placed:
        self._mesh.waiting.behind += 1
        try:
            await self._my_turn(turn)
        finally:
            self._mesh.waiting.behind -= 1
        while True:
            plan = await self._route()
            placed = None if plan is None else await self._try_plan(plan, turn)
            if placed is not None:
                self._mesh.metrics.prefill_offers.observe(self._num_offers)
                return placed
            if plan is None:
                await self._pause(turn)

    # --- asking the scheduler ---

    async def _route(self) -> RoutePlan | None:
        facts = self._mesh.router.facts
        if facts is None:
            message = f"no worker for {self._request.model} is known"
            self._note(Stage.GATEWAY, Refusal(RefusalReason.NO_WORKERS, message))
            return None
        request = self._request
        sequence = self._sequence
        if sequence is None or sequence.facts != facts:
            self._sequence = sequence = _sequence(request, self._token_ids, facts)
        remaining_s = self._remaining_s()
        query = self._query(remaining_s)
        with start_span("gateway.route", request.traceparent) as span:
            tried, self._tried = self._tried, None
            plan: RoutePlan | Refusal | None
            # Asked of the stock once for each request.
            plan = self._mesh.router.planned(query) if tried is None else tried.plan
            if plan is None:
                query = changed(query, block_hashes=sequence.block_hashes)
                plan = await self._mesh.router.route(query, span.traceparent, remaining_s)
            if isinstance(plan, Refusal):
                span.event("refused", reason=plan.reason.value, message=plan.message)
            else:
                span.set(placement=plan.placement.value, reason=plan.reason, policy=plan.policy)
        if tried is None or plan is not tried.plan:  # else they are to be avoided yet
            self._refusals.fade(self._now())
        if isinstance(plan, RoutePlan):
            self._trace.note(Moment.ROUTED, self._now(), text=f"{plan.policy}: {plan.reason}")
            return plan
        self._note(Stage.SCHEDULER, plan)
        if plan.reason in NEVER:
            raise InvalidRequestError(plan.message, code="context_length_exceeded")
        return None

    def _query(self, remaining_s: float) -> RouteQuery:
        """The question to the scheduler, without the hashes."""
        request = self._request
        waits = self._num_rounds > 0  # it asks again, since nobody took it
        counts = self._mesh.waiting
        waiting, waiting_reserved = waiting_told(
            counts.paused + waits, counts.paused_reserved + (waits and self._holds), counts.behind
        )
        num_generated = len(self._token_ids) - len(request.prompt_ids)
        return RouteQuery(
            request_id=request.request_id,
            model=request.model,
            num_tokens=len(self._token_ids),
            max_new_tokens=request.sampling.max_tokens - num_generated,
            scenario=request.scenario,
            avoid=self._failed.union(self._refusals.workers),
            ttft_budget_ms=_budget_ms(remaining_s),
            placement=request.placement,
            waiting=waiting,
            waiting_reserved=waiting_reserved,
            lost=self._failed,
        )

    # --- asking workers ---

    async def _try_plan(self, plan: RoutePlan, turn: Turn) -> Placed | None:
        """Rounds over the plan's candidates until it is old."""
        aggregated = plan.placement is Placement.AGGREGATED
        try_once = self._round_aggregated if aggregated else self._round_apart
        old_at = self._now() + REROUTE_AFTER_S
        for _ in range(rounds_per_route(plan.cause)):
            self._refusals.check(plan)
            try:
                placed = await try_once(plan)
            except ReservationLostError as error:
                self._note(Stage.DECODE, error.refusal)
                placed = None
            if placed is not None:
                return placed
            await self._pause(turn)
            if self._now() >= old_at:
                break
        return None

    async def _round_apart(self, plan: RoutePlan) -> Placed | None:
        """Reserve on the first that can, then offer to all."""
        for candidate in self._in_turn(plan):
            if not await self._has_reserved(plan.decode):
                return None
            if await self._show(candidate, self._work.offer):
                holder = self._work.reserved_at
                assert holder is not None, "an accepted offer has a reservation"
                return Placed(Placement.DISAGGREGATED, candidate.worker_id, holder, plan.cause)
        return None

    async def _has_reserved(self, candidates: Sequence[Candidate]) -> bool:
        """Whether one of them holds blocks for the request; asks them if not."""
        if self._work.reserved_at in {candidate.worker_id for candidate in candidates}:
            return True
        for candidate in candidates:
            if await self._reserve(candidate):
                return True
        return False

    def _in_turn(self, plan: RoutePlan) -> Sequence[Candidate]:
        """The prefill workers as they are asked: by this gateway's connections, or as planned."""
        if plan.policy not in BY_CONNECTIONS:
            return plan.prefill
        named = {candidate.worker_id: candidate for candidate in plan.prefill}
        return [named[worker_id] for worker_id in self._mesh.connections.order(list(named))]

    async def _round_aggregated(self, plan: RoutePlan) -> Placed | None:
        """Reserve and offer in one, one worker after the other."""
        for candidate in plan.prefill:
            if await self._show(candidate, self._work.start):
                worker_id = candidate.worker_id
                self._trace.note(Moment.RESERVED, self._now(), worker_id)
                return Placed(Placement.AGGREGATED, worker_id, worker_id, plan.cause)
        return None

    async def _show(self, candidate: Candidate, ask: ShowPrompt) -> bool:
        """Shows the prompt to a worker; True if it took it."""
        if self._refusals.is_for_ever(candidate.worker_id):
            return False
        span = self._span("gateway.offer")
        remaining_s = self._remaining_s()
        try:
            refused = await ask(
                candidate, self._message, span.traceparent, _budget_ms(remaining_s), remaining_s
            )
        except ReservationLostError:
            self._num_offers += 1
            raise
        if refused is None:
            self._num_offers += 1
            self._end_span("gateway.offer", candidate)
            return True
        self._num_offers += refused.by_prefill
        if refused.by_prefill:
            self._mesh.connections.rejected(candidate.worker_id)
        stage = Stage.PREFILL if refused.by_prefill else Stage.DECODE
        self._note(stage, refused.refusal, candidate, span)
        return False

    async def _reserve(self, candidate: Candidate) -> bool:
        if self._refusals.is_for_ever(candidate.worker_id):
            return False
        span = self._span("gateway.reserve")
        refusal = await self._work.reserve(
            candidate, self._message, span.traceparent, self._remaining_s()
        )
        if refusal is not None:
            self._note(Stage.DECODE, refusal, candidate, span)
            return False
        self._end_span("gateway.reserve", candidate)
        self._trace.note(Moment.RESERVED, self._now(), candidate.worker_id)
        return True

    def _note(
        self,
        stage: Stage,
        refusal: Refusal,
        candidate: Candidate | None = None,
        span: Span | None = None,
    ) -> None:
        """Remembers a refusal: it is counted, traced, and the last one is the client's answer."""
        where = None if candidate is None else candidate.worker_id
        self._refusals.note(stage, refusal, where, self._now())
        self._mesh.metrics.refused(refusal.reason.value, stage.value)
        text = f"{stage.value}: {refusal.reason.value}"
        self._trace.note(Moment.REFUSED, self._now(), where, text)
        if candidate is None:
            return
        if span is not None:
            reason = refusal.reason.value
            span.event("refused", worker=candidate.worker_id, reason=reason)
        self._mesh.router.note_refused()

    # --- time ---

    @property
    def _message(self) -> types_pb2.SequenceSpec:
        assert self._sequence is not None, "a plan comes before its sequence is sent"
        return self._sequence.message

    def _remaining_s(self) -> float:
        """Time left, more than zero.

        Raises:
            StageRefusedError: there is none left.
        """
        left = self._deadline - self._now()
        if left > 0:
            return left
        raise self._refusals.after(self._request.ttft_s)

    @property
    def _holds(self) -> bool:
        return self._work.reserved_at is not None

    async def _pause(self, turn: Turn) -> None:
        """A short jittered wait after a full round, longer each time, and then for its turn."""
        turn.missed()
        # All together ask at the same rate, whether few look for workers at a time or all do.
        share = self._mesh.turns.share
        longest_s = backoff_s(self._num_rounds, self._mesh.waiting.count) * share
        self._num_rounds += 1
        wait_s = longest_s * self._mesh.rng.uniform(0.5, 1.0)
        waiting, holds = self._mesh.waiting, self._holds
        waiting.paused += 1
        waiting.paused_reserved += holds
        try:
            await asyncio.sleep(min(wait_s, self._remaining_s()))
            self._deadline = self._deadline_now()
            await self._my_turn(turn)
        finally:
            waiting.paused -= 1
            waiting.paused_reserved -= holds

    async def _my_turn(self, turn: Turn) -> None:
        await turn.wait(self._remaining_s())
        self._remaining_s()

    # --- spans that last over several rounds ---

    def _span(self, name: str) -> Span:
        if name not in self._spans:
            self._spans[name] = start_span(name, self._request.traceparent)
        return self._spans[name]

    def _end_span(self, name: str, candidate: Candidate) -> None:
        span = self._spans.pop(name)
        span.set(worker=candidate.worker_id)
        span.end()
