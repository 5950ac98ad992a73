"""The life of one request: placed, followed token by token, moved when a worker is lost.

Every exit, whatever it is, cancels what is still open at workers.
Tests: tests/integration/test_gateway_http.py, test_gateway_moves.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from kvmesh.console.request_log import Moment
from kvmesh.core.errors import DeadlineError, LostError, StructureError
from kvmesh.core.types import FinishReason, TokenLogprobs, WorkerId
from kvmesh.telemetry.logs import event_logger
from kvmesh.telemetry.tracing import Span, start_span
from kvmesh.v1.decode_service_pb2 import DecodeTokens
from services.gateway.beginning import asked_life, short_life
from services.gateway.generation import Begun, TokenDelta, WorkLostError, place_until
from services.gateway.mesh import GenerationRequest, Mesh, Placed
from services.gateway.open_work import OpenWork, Side
from services.gateway.phases import Phases
from services.gateway.placing import Placing
from services.gateway.short_life import Meter, NotTakenError, ShortLife
from services.gateway.token_lane import TokenLane
from services.gateway.worker_events import Failed, FirstToken, HandedOff, Tokens, WorkerEvent

log = event_logger(__name__)


class Generation:
    """One request from its first message to a worker to its last token; to be closed.

    Attributes:
        arrived_at: on the loop's clock.
    """

    def __init__(self, mesh: Mesh, request: GenerationRequest) -> None:
        self._mesh = mesh
        self._request = request
        self.arrived_at = now = asyncio.get_running_loop().time()
        until = now + mesh.limits.request_timeout_s
        self._begun = Begun(now, until, Phases(mesh.metrics, now))
        self._short: ShortLife | None = short_life(mesh, request, self._begun)
        self._long: AsyncGenerator[TokenDelta, None] | None = None
        self._lane: TokenLane | None = None
        self._is_open = True
        mesh.metrics.requests_open.inc()

    async def ask(self) -> None:
        """Has the scheduler plan it, if no plan was made ahead and nobody waits for a worker."""
        tried = self._begun.first_try
        if tried is not None and tried.plan is None:
            self._short = await asked_life(self._mesh, self._request, self._begun)

    def follow(self, lane: TokenLane | None, meter: Meter | None) -> None:
        """Says who is told of tokens, in the same turn of the loop that began it.

        Args:
            lane: takes what it can of the tokens; they do not come here then.
            meter: given, tokens may come many together; it is told when they came.
        """
        self._lane = lane
        if self._short is not None:
            self._short.follow(lane, meter)

    async def next(self) -> TokenDelta:
        """The next tokens; none come after those with a finish reason.

        Raises:
            StageRefusedError: nobody took the request in time.
            InvalidRequestError: no worker can ever take it.
            LostError: it was lost more often than `max_moves`.
            StructureError: the structure asked for cannot be followed.
            DeadlineError: it ran for longer than `request_timeout_s`.
        """
        # No generator around these two: the loop keeps account of each, in Python.
        short = self._short
        if short is not None:
            try:
                return await short.next()
            except NotTakenError:
                pass
            except WorkLostError as error:
                self._begun.lost = error
            short.close()
            self._short = None
        if self._long is None:
            self._long = _long_life(self._mesh, self._request, self._begun, self._lane)
        return await anext(self._long)

    async def aclose(self) -> None:
        """Ends all that is open. May be called again."""
        self.close()
        if self._long is not None:
            await self._long.aclose()

    def close(self) -> None:
        """Ends what is open, unless it goes the long way. May be called again."""
        if not self._is_open:
            return
        self._is_open = False
        if self._short is not None:
            self._short.close()
        self._mesh.metrics.requests_open.dec()


async def _long_life(
    mesh: Mesh, request: GenerationRequest, begun: Begun, lane: TokenLane | None
) -> AsyncGenerator[TokenDelta, None]:
    life = _Life(mesh, request, begun, lane)
    try:
        if begun.lost is not None:
            life.lost(begun.lost)
        while True:
            try:
                await life.place()
                delta = await life.first_token()
                yield delta
                while delta.finish_reason is None:
                    delta = await life.next_tokens()
                    yield delta
                return
            except WorkLostError as error:
                life.lost(error)
    finally:
        life.close()


def _raise_if_error(event: FirstToken | Tokens) -> None:
    """The worker could not choose a token: what was asked for cannot be generated."""
    if event.finish_reason is FinishReason.ERROR:
        raise StructureError(event.error)


class _Life:
    """State of a running request."""

    def __init__(
        self, mesh: Mesh, request: GenerationRequest, begun: Begun, lane: TokenLane | None
    ) -> None:
        self._mesh = mesh
        self._request = request
        self._begun = begun
        self._work = OpenWork(request.request_id, mesh.sessions, _last_attempt=begun.num_attempts)
        self._tokens = begun.tokens
        self._early: list[Tokens] = []
        self._avoid: set[WorkerId] = set()
        self._moves = 0
        self._cached_tokens = begun.cached_tokens
        self._placed: Placed | None = None
        self._is_connected = False
        self._handed_off = False
        self._decode_span: Span | None = None
        self._lane = lane
        self._lane_at = 0.0
        self._trace = mesh.log.trace(request.request_id)
        self._now = asyncio.get_running_loop().time
        self._deadline = begun.deadline
        self._phases = begun.phases
        self._place_again_until: float | None = None

    @property
    def _where(self) -> Placed:
        assert self._placed is not None, "tokens come after placing"
        return self._placed

    def _place_until(self) -> float:
        """When the search for workers has to end, by what is known now."""
        if self._place_again_until is not None:
            return self._place_again_until
        return place_until(self._mesh, self._request, self._begun)

    async def place(self) -> None:
        """Finds workers for the sequence as it is now."""
        self._handed_off = False
        search = Placing(
            self._mesh,
            self._work,
            self._request,
            token_ids=self._request.prompt_ids + tuple(self._tokens),
            deadline=self._place_until,
            avoid=frozenset(self._avoid),
            first_try=self._begun.first_try,
        )
        self._begun.first_try = None
        self._placed = where = await search.run()
        self._mesh.connections.accepted(where.prefill_worker)
        self._is_connected = True
        now = self._now()
        self._phases.accepted(now)
        self._trace.placed(now, where.placement, where.prefill_worker, where.decode_worker)

    async def first_token(self) -> TokenDelta:
        """Waits for the prefill worker's token."""
        where = self._where
        accepted_at = self._now()
        until = accepted_at + self._mesh.limits.prefill_timeout_s
        with start_span("gateway.first_token", self._request.traceparent) as span:
            while True:
                side, event = await self._event(until, where.prefill_worker, "prefill_stalled")
                if isinstance(event, FirstToken):
                    break
                if isinstance(event, Tokens):
                    self._work.keep_early(event)
                self._raise_if_failed(side, event)
            span.set(cached_tokens=event.cached_tokens)
        self._mesh.prefill_times.note(
            len(self._request.prompt_ids) + len(self._tokens), self._now() - accepted_at
        )
        self._early = self._work.take_early()
        if self._cached_tokens is None:
            self._cached_tokens = self._trace.cached_tokens = event.cached_tokens
        self._trace.note(Moment.FIRST_TOKEN, self._now(), where.prefill_worker)
        if event.finish_reason is not None:
            self._work.prefill_is_over()  # the reservation, never used, is cancelled at the end
            _raise_if_error(event)
        else:
            self._decode_span = start_span("gateway.decode", self._request.traceparent)
            if self._work.is_started:
                self._now_decoding()
        logprobs = () if event.logprobs is None else (event.logprobs,)
        delta = self._delta((event.token_id,), logprobs, event.finish_reason)
        if self._request.sampling.num_prompt_logprobs >= 0:
            # If the stream moves, the prompt is not scored again.
            sampling = replace(self._request.sampling, num_prompt_logprobs=-1)
            self._request = replace(self._request, sampling=sampling)
            delta = replace(delta, prompt_logprobs=event.prompt_logprobs)
        return delta

    async def next_tokens(self) -> TokenDelta:
        """Waits for the decode worker's next tokens."""
        while True:
            event = self._early.pop(0) if self._early else await self._decode_event()
            self._now_decoding()
            position = len(self._request.prompt_ids) + len(self._tokens)
            repeated = position - event.first_position
            if repeated < 0:
                raise WorkLostError(
                    self._where.decode_worker,
                    "token_gap",
                    f"tokens at {event.first_position}, expected {position}",
                )
            token_ids = event.token_ids[repeated:]
            if event.finish_reason is not None:
                self._work.decode_is_over()
                _raise_if_error(event)
            if token_ids or event.finish_reason is not None:
                return self._delta(token_ids, event.logprobs[repeated:], event.finish_reason)

    def lost(self, error: WorkLostError) -> None:
        """Gets ready to start again elsewhere.

        Raises:
            LostError: it happened too often.
        """
        self.close()
        self._moves += 1
        self._avoid.add(error.worker_id)
        self._mesh.metrics.moved(error.reason)
        self._trace.note(Moment.LOST, self._now(), error.worker_id, error.reason)
        log.warning(
            "request_lost_by_worker",
            request_id=self._request.request_id,
            worker=error.worker_id,
            reason=error.reason,
            error=str(error),
            num_tokens=len(self._tokens),
        )
        if self._moves > self._mesh.limits.max_moves:
            raise LostError(f"the request was lost {self._moves} times; last: {error}") from error
        if self._tokens:
            # The client is already reading: what counts is that the stream goes on at all.
            default_s = self._mesh.limits.ttft_deadline_ms / 1000
            patience_s = max(self._request.ttft_s, default_s)
            self._place_again_until = min(self._deadline, self._now() + patience_s)

    def close(self) -> None:
        """Cancels what is open. May be called again."""
        self._work.close()
        if self._is_connected:
            self._is_connected = False
            self._mesh.connections.ended(self._where.prefill_worker)
        self._early.clear()
        if self._decode_span is not None:
            self._decode_span.set(num_tokens=len(self._tokens))
            self._decode_span.end()
            self._decode_span = None

    async def _decode_event(self) -> Tokens:
        """The next tokens; a worker is lost after a time without progress."""
        limits = self._mesh.limits
        while True:
            where = self._where
            patience_s = limits.stall_s if self._handed_off else limits.prefill_timeout_s
            slow = where.decode_worker if self._handed_off else where.prefill_worker
            reason = "decode_stalled" if self._handed_off else "handoff_stalled"
            if self._lane is not None and self._handed_off:
                self._work.open_short_way(self._take_short)
            try:
                side, event = await self._event(self._now() + patience_s, slow, reason)
            except WorkLostError:
                if self._lane_at + patience_s <= self._now():
                    raise
                continue  # tokens went by on the lane meanwhile
            if isinstance(event, Tokens):
                if self._handed_off and self._goes_by(event):
                    continue
                return event
            if isinstance(event, HandedOff):
                self._now_decoding()
            self._raise_if_failed(side, event)

    def _goes_by(self, event: Tokens) -> bool:
        """Lets tokens that waited for this request's turn go the short way after all."""
        if event.finish_reason is not None or event.logprobs:
            return False
        return self._to_lane(event.token_ids, event.first_position)

    def _take_short(self, tokens: DecodeTokens) -> bool:
        """Lets tokens go the short way as they come off the wire."""
        if tokens.finish_reason or tokens.logprobs:
            return False
        return self._to_lane(tokens.token_ids, tokens.first_position)

    def _to_lane(self, token_ids: Sequence[int], first_position: int) -> bool:
        """Lets tokens through to the lane if they are simply the next ones."""
        if (
            self._lane is None
            or not token_ids
            or first_position != len(self._request.prompt_ids) + len(self._tokens)
        ):
            return False
        now = self._now()
        if not self._lane.push(token_ids, now):
            return False
        self._tokens.extend(token_ids)
        self._lane_at = now
        return True

    def _now_decoding(self) -> None:
        """The KV is at the decode worker: nothing is left to do for prefill."""
        if not self._handed_off:
            self._trace.note(Moment.HANDED_OFF, self._now(), self._where.decode_worker)
        self._handed_off = True
        self._work.prefill_is_over()
        self._work.reservation_is_used()

    def _raise_if_failed(self, side: Side, event: WorkerEvent) -> None:
        if isinstance(event, Failed):
            where = self._where
            worker = where.prefill_worker if side is Side.PREFILL else where.decode_worker
            raise WorkLostError(worker, f"{side.value}_failed", event.refusal.message)

    async def _event(self, until: float, slow: WorkerId, reason: str) -> tuple[Side, WorkerEvent]:
        """The next event.

        Args:
            until: then the worker `slow` is lost, for `reason`.
        """
        limit = min(until, self._deadline)
        try:
            return await self._work.next_event(limit - self._now())
        except TimeoutError as error:
            if self._now() >= self._deadline:
                timeout_s = self._mesh.limits.request_timeout_s
                raise DeadlineError(f"the request ran for longer than {timeout_s} s") from error
            raise WorkLostError(slow, reason, f"no progress at {slow}") from error

    def _delta(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        finish_reason: FinishReason | None,
    ) -> TokenDelta:
        self._tokens.extend(token_ids)
        self._phases.token(self._now())
        if finish_reason is not None:
            self._phases.finished(self._now())
        cached = self._cached_tokens or 0
        return TokenDelta(token_ids, logprobs, finish_reason, cached, self._where)
