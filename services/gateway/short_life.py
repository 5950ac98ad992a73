"""The short way of a whole request: one plan, one worker for all, and then its events.

Nearly all requests of a gateway that keeps up have a plan soon (`beginning.py`), a worker that
takes them at once, and nothing else happens until the last token. Such a one needs no search and no
mailbox: its message goes out where its plan is, and what the worker says is taken as it comes off
the wire. Whatever is not so (two workers, a refusal, a loss, a trace to be kept) goes the long way,
in `request_flow`, which takes over what there is: same seed, same tokens, nothing lost or repeated.
Tests: tests/integration/test_gateway_short_life.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from kvmesh.console.request_log import Moment, RequestTrace
from kvmesh.core.errors import DeadlineError, KvMeshError, LostError, StructureError
from kvmesh.core.types import (
    FinishReason,
    Placement,
    Refusal,
    RefusalReason,
    RoutePlan,
)
from kvmesh.rpc.convert import finish_reason_from_proto
from kvmesh.v1.decode_service_pb2 import DecodeEvent, DecodeRequest, DecodeTokens
from kvmesh.v1.prefill_service_pb2 import PrefillFirstToken
from services.gateway.errors import Stage, StageRefusedError
from services.gateway.generation import Begun, FirstTry, TokenDelta, WorkLostError
from services.gateway.mesh import GenerationRequest, Mesh, Placed
from services.gateway.open_work import ANSWER_TIMEOUT_S
from services.gateway.token_lane import TokenLane
from services.gateway.worker_events import Failed, Refused, WorkerEvent
from services.gateway.worker_sessions import WorkerSession

FIRST_ATTEMPT = 1

MAX_TOGETHER = 256
"""Tokens of a whole answer that come together: more would hold up other requests meanwhile."""


class NotTakenError(LostError):
    """The worker did not take the request; the search for another one begins."""


class Meter(Protocol):
    """Is told of tokens when they come, where nobody else sees them until later."""

    def first(self, count: int, now: float) -> None:
        """The first tokens came, at `now` on the loop's clock."""
        ...

    def tokens(self, count: int, now: float) -> None:
        """More tokens came."""
        ...


class ShortLife:
    """One request at one worker; `next` gives its tokens, `close` ends it.

    Args:
        sent_at, place_until: when it goes to the worker, and when one must have taken it.

    Attributes:
        placed: where it runs.
    """

    def __init__(
        self,
        mesh: Mesh,
        request: GenerationRequest,
        begun: Begun,
        session: WorkerSession,
        plan: RoutePlan,
        *,
        sent_at: float,
        place_until: float,
    ) -> None:
        self._mesh = mesh
        self._request = request
        self._begun = begun
        self._session = session
        self._plan = plan
        self._place_until = place_until
        self._lane: TokenLane | None = None
        self._meter: Meter | None = None
        worker = session.worker_id
        self.placed = Placed(Placement.AGGREGATED, worker, worker, plan.cause)
        self._key = (request.request_id, FIRST_ATTEMPT)
        self._loop = asyncio.get_running_loop()
        self._position = len(request.prompt_ids)
        self._pending: list[int] = []
        self._early: list[DecodeTokens] = []
        self._num_told = 0
        self._finish: FinishReason | None = None
        self._error: KvMeshError | None = None
        self._wake: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_waiting = False
        self._is_accepted = False
        self._is_open = False
        self._sent_at = self._progress_at = sent_at
        self._accepted_at: float | None = None
        self._trace: RequestTrace

    def start(self, message: DecodeRequest) -> None:
        """Sends the request to the worker."""
        mesh = self._mesh
        self._begun.num_attempts = FIRST_ATTEMPT
        self._session.reserve(self._key, message, self)
        self._is_open = True
        mesh.crowd.enter(self._request.tenant.name)
        mesh.waiting.count += 1
        self._is_waiting = True
        limits = mesh.limits
        # Early enough for any limit; what is due then is looked up when it is over.
        soonest = self._sent_at + min(ANSWER_TIMEOUT_S, limits.prefill_timeout_s, limits.stall_s)
        self._timer = self._loop.call_at(min(soonest, self._place_until), self._look)

    def follow(self, lane: TokenLane | None, meter: Meter | None) -> None:
        """Says who is told of tokens, in the same turn of the loop that began it.

        Args:
            lane: takes what it can of the tokens.
            meter: is told of all tokens, which come many together then, the last ones at the end.
        """
        self._lane, self._meter = lane, meter
        if lane is not None:
            lane.placed(self.placed)
        self._trace = self._mesh.log.trace(self._request.request_id)
        text = f"{self._plan.policy}: {self._plan.reason}"
        self._trace.note(Moment.ROUTED, self._sent_at, text=text)

    async def next(self) -> TokenDelta:
        """The next tokens that did not go by the lane.

        Raises:
            NotTakenError: the worker did not take the request.
            WorkLostError: it did, and lost it.
            StructureError: the structure asked for cannot be followed.
            DeadlineError: the request ran for longer than `request_timeout_s`.
        """
        if not self._pending and self._finish is None and self._error is None:
            self._wake = self._loop.create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        if not self._pending and self._finish is None:
            assert self._error is not None, "woken for a reason"
            raise self._error
        token_ids, self._pending = tuple(self._pending), []
        num_told, self._num_told = self._num_told, 0
        cached = self._begun.cached_tokens or 0
        return TokenDelta(token_ids, (), self._finish, cached, self.placed, (), num_told)

    def close(self) -> None:
        """Ends what is open. May be called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._book()
        self._search_ends(placed=False)
        if self._is_open:
            self._is_open = False
            self._session.cancel_decode(self._key)
        if self._is_accepted:
            self._is_accepted = False
            self._mesh.connections.ended(self._session.worker_id)

    # --- from the worker ---

    def takes(self, message: Any) -> bool:
        """Takes an event as it comes off the wire; False if it is not one of the usual ones."""
        assert isinstance(message, DecodeEvent), "one stream for all"
        if self._error is not None or self._finish is not None:
            return True  # of an attempt that is over
        kind = message.WhichOneof("event")
        if kind == "tokens":
            self._take_tokens(message.tokens)
            return True
        if not message.HasField("prefill"):
            return False
        if kind == "reserved":
            reserved = message.reserved
            if reserved.worker_id != self._session.worker_id or self._is_accepted:
                return False
            self._accepted(reserved.lease_ms)
            return True
        match message.prefill.WhichOneof("event"):
            case "first_token":
                self._first(message.prefill.first_token)
            case "handed_off":
                pass  # where one worker does all, the first token has said so
            case _:
                return False
        return True

    def put(self, _attempt: int, event: WorkerEvent) -> None:
        """Takes any other event: it ends the short way."""
        if self._error is not None or self._finish is not None:
            return
        worker = self._session.worker_id
        if isinstance(event, (Failed, Refused)):
            if self._is_accepted:
                side = "prefill" if event.by_prefill else "decode"
                self._fail(WorkLostError(worker, f"{side}_failed", event.refusal.message))
            else:
                self._refused(event.refusal, by_prefill=event.by_prefill)
        elif self._is_accepted:
            text = f"{type(event).__name__} out of order"
            self._fail(WorkLostError(worker, "decode_failed", text))
        else:
            # An older worker only reserves, or another one took over its address.
            self._session.starts = False
            self._not_taken()

    def _accepted(self, lease_ms: int) -> None:
        self._is_accepted = True
        self._begun.first_try = None  # carried out: if it is lost now, another plan is needed
        self._progress_at = self._accepted_at = self._loop.time()
        self._session.hold(self._key, lease_ms)
        if self._lane is None:
            self._book()
        else:  # the first token may have come along: it goes out before anything is noted
            self._loop.call_soon(self._book)

    def _book(self) -> None:
        """Notes that the worker took the request, if it did, once."""
        at, self._accepted_at = self._accepted_at, None
        if at is None:
            return
        mesh, worker = self._mesh, self._session.worker_id
        self._trace.note(Moment.RESERVED, at, worker)
        self._search_ends(placed=True)
        mesh.metrics.prefill_offers.observe(1)
        mesh.connections.accepted(worker)
        self._begun.phases.accepted(at)
        self._trace.placed(at, Placement.AGGREGATED, worker, worker)

    def _first(self, first: PrefillFirstToken) -> None:
        now, begun, worker = self._loop.time(), self._begun, self._session.worker_id
        if not self._is_accepted or begun.tokens:
            self._fail(WorkLostError(worker, "token_gap", "a first token out of order"))
            return
        begun.cached_tokens = first.cached_tokens
        finish = finish_reason_from_proto(first.finish_reason)
        token_ids = (first.token_id,)
        is_sent = finish is None and self._begins_lane(token_ids, now)
        self._book()
        self._mesh.prefill_times.note(self._position, now - self._progress_at)
        self._trace.cached_tokens = first.cached_tokens
        self._trace.note(Moment.FIRST_TOKEN, now, worker)
        if finish is None:
            self._trace.note(Moment.HANDED_OFF, now, worker)
            self._session.release(self._key)
        begun.phases.token(now)
        if is_sent:
            self._progress_at = now
            begun.tokens.extend(token_ids)
        else:
            self._take(token_ids, finish, first.error, now)
        early, self._early = self._early, []
        for tokens in early:
            self._take_tokens(tokens)

    def _take_tokens(self, tokens: DecodeTokens) -> None:
        if not self._begun.tokens:  # a worker may decode before it has told the first one
            self._early.append(tokens)
            return
        position = self._position + len(self._begun.tokens)
        first = tokens.first_position
        if first > position:
            worker = self._session.worker_id
            text = f"tokens at {first}, expected {position}"
            self._fail(WorkLostError(worker, "token_gap", text))
            return
        token_ids: Sequence[int] = tokens.token_ids
        if first < position:
            token_ids = token_ids[position - first :]
        finish = finish_reason_from_proto(tokens.finish_reason)
        now = self._loop.time()
        if finish is None:
            if self._wake is not None and not self._wake.done() and not self._pending:
                lane = self._lane
                if lane is not None and token_ids and lane.push(token_ids, now):
                    self._begun.tokens.extend(token_ids)
                    self._progress_at = now
                    return
        else:
            self._session.release(self._key)
            self._session.decode.forget(self._key)
            self._is_open = False
        self._take(token_ids, finish, tokens.error, now)

    def _take(
        self, token_ids: Sequence[int], finish: FinishReason | None, error: str, now: float
    ) -> None:
        """Keeps tokens for `next`."""
        if finish is FinishReason.ERROR:
            self._fail(StructureError(error))
            return
        begun = self._begun
        self._progress_at = now
        if not token_ids and finish is None:
            return  # all of them were repeated
        is_first = not begun.tokens
        begun.tokens.extend(token_ids)
        self._pending.extend(token_ids)
        self._finish = finish
        if finish is not None:
            begun.phases.finished(now)
        meter = self._meter
        if meter is not None:
            (meter.first if is_first else meter.tokens)(len(token_ids), now)
            self._num_told += len(token_ids)
        if finish is not None or meter is None or len(self._pending) >= MAX_TOGETHER:
            self._wake_up()

    def _begins_lane(self, token_ids: Sequence[int], now: float) -> bool:
        """Sends the first tokens with all that comes before them, if that is prepared."""
        lane, wake = self._lane, self._wake
        waits = wake is not None and not wake.done()
        return lane is not None and waits and lane.first(token_ids, now)

    # --- ends ---

    def _refused(self, refusal: Refusal, *, by_prefill: bool) -> None:
        """Notes a refusal as the long way does."""
        mesh, worker = self._mesh, self._session.worker_id
        stage = Stage.PREFILL if by_prefill else Stage.DECODE
        if by_prefill:
            mesh.connections.rejected(worker)
        mesh.metrics.refused(refusal.reason.value, stage.value)
        text = f"{stage.value}: {refusal.reason.value}"
        self._trace.note(Moment.REFUSED, self._loop.time(), worker, text)
        mesh.router.note_refused()
        rest = self._plan.prefill[1:]
        plan = replace(self._plan, prefill=rest) if rest else None
        self._begun.first_try = FirstTry(plan, worker, StageRefusedError(refusal, stage))
        self._not_taken()

    def _not_taken(self) -> None:
        self._fail(NotTakenError(f"{self._session.worker_id} did not take the request"))

    def _search_ends(self, *, placed: bool) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._mesh.waiting.count -= 1
            self._mesh.crowd.leave(self._request.tenant.name, self._loop.time(), placed=placed)

    def _fail(self, error: KvMeshError) -> None:
        self._error = error
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _look(self) -> None:
        """Ends it if something is overdue; else looks again when the next thing would be."""
        limits, begun = self._mesh.limits, self._begun
        due = min(self._sent_at + ANSWER_TIMEOUT_S, self._place_until)
        if self._is_accepted:
            due = self._progress_at + (limits.stall_s if begun.tokens else limits.prefill_timeout_s)
        due = min(due, begun.deadline)
        now = self._loop.time()
        if now < due:
            # The first token may come at once, and what is due then may be due sooner.
            self._timer = self._loop.call_at(min(due, now + limits.stall_s), self._look)
        elif now >= begun.deadline:
            text = f"the request ran for longer than {limits.request_timeout_s} s"
            self._fail(DeadlineError(text))
        elif self._is_accepted:
            worker = self._session.worker_id
            reason = "decode_stalled" if begun.tokens else "prefill_stalled"
            self._fail(WorkLostError(worker, reason, f"no progress at {worker}"))
        elif now >= self._place_until:  # the request ran out of time, not the worker
            message = "the deadline passed before the worker answered"
            self._refused(Refusal(RefusalReason.DEADLINE, message), by_prefill=False)
        else:
            message = "the worker did not answer in time"
            self._refused(Refusal(RefusalReason.LOST, message), by_prefill=False)
