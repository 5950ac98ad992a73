"""One request: a search with a plan and an attempt, repeated when a worker loses the request.

Workers' messages go to the attempt as they arrive. This module performs the actions that the
attempt returns, in the same call. The request's task wakes when a search has its answer and when
the request ends, not for tokens. Every exit cancels everything that is still open at workers.
Tests: tests/integration/test_gateway_one_worker.py, test_gateway_moves.py.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvmesh.core.adapters import made_by
from kvmesh.core.errors import DeadlineError, KvMeshError, LostError, StructureError
from kvmesh.core.types import (
    BlockHash,
    Candidate,
    FinishReason,
    Refusal,
    RefusalReason,
    SequenceSpec,
    TokenLogprobs,
    WorkerId,
)
from kvmesh.policy.answer_times import MAX_WAIT_S
from kvmesh.rpc.convert import fill_sequence_spec, limit_to_ms, reservation_to_proto
from kvmesh.rpc.convert_route import prefix_source_to_proto
from kvmesh.v1 import types_pb2
from kvmesh.v1.decode_service_pb2 import DecodeRequest
from kvmesh.v1.prefill_service_pb2 import PrefillRequest
from services.gateway.errors import Stage
from services.gateway.request import actions as act
from services.gateway.request.actions import Actions, Kind, Limits, Outcome, Side
from services.gateway.request.attempt import Attempt
from services.gateway.request.ledger import Ledger
from services.gateway.request.mesh import GenerationRequest, Mesh, Placed
from services.gateway.request.prefetch import Prefetch
from services.gateway.request.search import Search, as_ms
from services.gateway.tenants.admission import Ticket
from services.gateway.wire.worker_events import (
    Accepted,
    Failed,
    FirstToken,
    HandedOff,
    Progress,
    Refused,
    Reserved,
    Started,
    Tokens,
    WorkerEvent,
)
from services.gateway.wire.worker_sessions import AttemptKey, Link, WorkerSession

REPORTS = 4
"""Reports of a prefill worker's progress within `limits.prefill_timeout_s`."""


class Receiver(Protocol):
    """Receives a request's tokens."""

    def placed(self, where: Placed) -> None:
        """Called with the workers that run the request from now on."""
        ...

    def first(
        self, cached_tokens: int, prompt_logprobs: Sequence[TokenLogprobs], embedding: bytes
    ) -> None:
        """Called once, before the request's first token."""
        ...

    def tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
        now: float,
    ) -> bool:
        """Takes the next tokens, each exactly once; False ends the request."""
        ...


class Life:
    """One request; `run` runs it to its end, `close` ends it early.

    Args:
        delivered: tokens that another gateway has delivered to the client.

    Attributes:
        receiver: takes the tokens; set it before `run`.
        is_read: the client has been sent tokens of this request or of another choice of its call.
        ledger: the request's bookkeeping.
    """

    def __init__(
        self,
        mesh: Mesh,
        request: GenerationRequest,
        ticket: Ticket | None,
        delivered: Sequence[int] | None = None,
    ) -> None:
        self._mesh = mesh
        self._loop = asyncio.get_running_loop()
        arrived_at = request.arrived_at
        self._deadline = arrived_at + mesh.limits.request_timeout_s
        self._report_ms = as_ms(mesh.limits.prefill_timeout_s / REPORTS)
        self.ledger = Ledger(mesh, request, ticket, arrived_at)
        self._request = self.ledger.request
        self.receiver: Receiver | None = None
        self.is_read = False
        self._tokens: list[int] = list(delivered or ())
        self._is_resumed = bool(delivered)
        self._wants_more = True
        self._avoid: frozenset[WorkerId] = frozenset()
        self._checkpoint = self._request.checkpoint
        self._num_moves = 0
        self._sessions: dict[int, WorkerSession] = {}
        self._reservation: Reserved | None = None
        self._written: tuple[SequenceSpec, types_pb2.SequenceSpec] | None = None
        self._prefetch = Prefetch(mesh.sessions, request.request_id)
        self._connecting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticks_at = math.inf  # kept here, since a uvloop timer cannot always report its time
        self._wake: asyncio.Future[None] | None = None
        self._is_open = True
        self._answer: bool | None = None
        self._move: act.Move | None = None
        self._error: KvMeshError | None = None
        self._numbers = itertools.count(1)
        self._new_attempt()

    def _new_attempt(self) -> None:
        limits = self._mesh.limits
        waits = Limits(MAX_WAIT_S, limits.prefill_timeout_s, limits.stall_s)
        token_ids = self._request.prompt_ids
        again_until: float | None = None
        if self._tokens:
            token_ids += tuple(self._tokens)
        if self._tokens or self.is_read:
            # The client is already reading, so it prefers late tokens to an error.
            patience_s = max(self._request.ttft_s, limits.ttft_deadline_ms / 1000)
            again_until = min(self._deadline, self._loop.time() + patience_s)
        self._num_sent = len(token_ids)
        self._attempt = Attempt(self._num_sent, waits, self._deadline, self._numbers)
        self._search = Search(
            self._mesh,
            self.ledger,
            self,
            token_ids,
            again_until=again_until,
            is_resumed=self._is_resumed,
            avoid=self._avoid,
            fingerprint=self._checkpoint,
        )

    async def run(self) -> None:
        """Runs the request to its end.

        Raises:
            StageRefusedError: no worker took the request in time.
            InvalidRequestError: no worker can ever take it.
            LostError: workers lost it more often than `max_moves`.
            StructureError: no token fits the requested structure.
            DeadlineError: it ran for longer than `request_timeout_s`.
        """
        assert self.receiver is not None, "a receiver takes the tokens"
        try:
            while True:
                await self._search.run()
                while self._attempt.outcome is None:
                    await self._wait()
                if self._error is not None:
                    raise self._pop_error()
                if self._attempt.outcome is not Outcome.MOVED:
                    return
                self._start_again()
        except KvMeshError as error:
            self.ledger.failed(error)
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Cancels everything that is still open at workers. May be called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_open:
            self._is_open = False
            self._perform(self._attempt.cancel())
            self._prefetch.end()
            self.ledger.close(len(self._tokens), self._loop.time())
            del self._search  # breaks a reference cycle that only a collection would free

    def _pop_error(self) -> KvMeshError:
        """Returns the request's error and drops it, since its traceback refers to this object."""
        error, self._error = self._error, None
        assert error is not None, "there is one"
        return error

    def _start_again(self) -> None:
        """Starts the next attempt, without the worker that lost this one.

        Raises:
            LostError: workers lost the request too often.
        """
        move, now = self._move, self._loop.time()
        assert move is not None, "lost by a worker"
        self._num_moves += 1
        self._avoid |= {move.worker_id}
        self.ledger.lost(move, len(self._tokens), now)
        limits = self._mesh.limits
        if self._num_moves > limits.max_moves:
            raise LostError(f"the request was lost {self._num_moves} times; last: {move.text}")
        self._move = self._answer = None
        self._is_resumed = False  # workers have taken it here
        self._new_attempt()

    # --- for the search, which calls this object as its `search.Asker` ---

    @property
    def holds(self) -> bool:
        """Whether a decode worker's reservation waits for a prefill worker."""
        return self._attempt.holds

    def ask(self, prefill: Sequence[Candidate], decode: Sequence[Candidate], until: float) -> None:
        """Asks the workers of a plan, one after the other, until the time `until`."""
        self._answer, now = None, self._loop.time()
        self._perform_timed(self._attempt.ask(prefill, decode, until, now))

    async def answer(self) -> bool:
        """Waits until a worker takes the request or all refuse; True if a worker took it."""
        while self._answer is None:
            await self._wait()
        return self._answer

    def prefetch(self, candidate: Candidate, hashes: Sequence[BlockHash]) -> None:
        """Lets a worker load the prefix blocks that it holds below its pool."""
        self._prefetch.begin(candidate, hashes)

    # --- from workers, which call this object as their `worker_sessions.Taker` ---

    def takes(self, number: int, tokens: Tokens) -> None:
        """Takes plain tokens; others come to `put`."""
        self._perform(self._attempt.tokens(number, tokens, self._loop.time()))

    def put(self, number: int, event: WorkerEvent) -> None:
        """Takes a worker's event."""
        attempt, now = self._attempt, self._loop.time()
        actions: Actions
        match event:
            case Tokens():
                actions = attempt.tokens(number, event, now)
            case Started():
                actions = attempt.reserved(number, event.lease_ms, now, starts=True)
            case FirstToken():
                actions = attempt.first_token(number, event, now)
            case HandedOff():
                actions = attempt.handed_off(number, now)
            case Progress():
                actions = attempt.progress(number, now)
            case Reserved():
                self._reservation = event
                actions = attempt.reserved(number, event.reservation.lease_ms, now)
            case Accepted():
                actions = attempt.accepted(number, now)
            case Refused() | Failed():
                side = Side.PREFILL if event.by_prefill else Side.DECODE
                actions = attempt.ended(number, side, event.refusal, now)
        self._perform_timed(actions)

    # --- the attempt's actions ---

    def _perform_timed(self, actions: Actions) -> None:
        self._perform(actions)
        self._set_timer()

    def _set_timer(self) -> None:
        """Sets the timer to the attempt's next due time, unless it is set to an earlier one."""
        due = self._attempt.due
        if due < self._ticks_at:
            if self._timer is not None:
                self._timer.cancel()
            self._ticks_at = due
            self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        # A process that stood still has answers to read, which come before what is due.
        self._timer = self._loop.call_later(0, self._due)

    def _due(self) -> None:
        self._timer, self._ticks_at = None, math.inf
        self._perform_timed(self._attempt.tick(self._loop.time()))

    def _perform(self, actions: Actions) -> None:
        while actions:
            more: Actions = ()
            for action in actions:
                more = _PERFORM[type(action)](self, action) or more
            actions = more

    def _asked(self, ask: act.Ask) -> Actions | None:
        link: Link | None = None
        try:
            session = self._mesh.sessions.session(ask.candidate)
            link = session.prefill if ask.kind is Kind.OFFER else session.decode
            if not link.stream.connected and session.may_connect_s() > 0:
                self._attempt.answer_s = MAX_WAIT_S  # for the connection, too
                connecting = self._ask_later(ask, session, link)
                self._connecting = self._loop.create_task(connecting)
                return None
            self._attempt.answer_s = self._mesh.sessions.times.wait_s(link.answers)
            self._send(ask, session)
        except LostError as error:
            return self._not_asked(ask, error)
        return None

    async def _ask_later(self, ask: act.Ask, session: WorkerSession, link: Link) -> None:
        """Waits for a connection that was just started, then asks."""
        try:
            await link.stream.wait_connected(session.may_connect_s())
            self._send(ask, session)
        except LostError as error:
            self._perform_timed(self._not_asked(ask, error))

    def _not_asked(self, ask: act.Ask, error: LostError) -> Actions:
        refusal = Refusal(RefusalReason.LOST, str(error))
        return self._attempt.ended(ask.number, ask.side, refusal, self._loop.time())

    def _send(self, ask: act.Ask, session: WorkerSession) -> None:
        key, search, source = self._key(ask.number), self._search, ask.candidate.source
        traceparent = self.ledger.asks(ask.kind)
        if ask.kind is Kind.OFFER:
            assert self._reservation is not None, "an offer needs a reservation"
            message = PrefillRequest()
            offer = message.offer
            self._write_sequence(offer.sequence)
            offer.reservation.CopyFrom(reservation_to_proto(self._reservation.reservation))
            offer.ttft_budget_ms = search.remaining_ms
            offer.progress_ms = self._report_ms
            offer.traceparent = traceparent
            if source is not None:
                offer.source.CopyFrom(prefix_source_to_proto(source))
            session.offer(key, message, self)
        else:
            request = DecodeRequest()
            reserve = request.reserve
            self._write_sequence(reserve.sequence)
            reserve.traceparent = traceparent
            reserve.tpot_ms = limit_to_ms(self.ledger.request.tpot_s)
            reserve.itl_ms = limit_to_ms(self.ledger.request.itl_s)
            if ask.kind is Kind.START:
                reserve.start_within_ms = search.remaining_ms
                reserve.progress_ms = self._report_ms
                if source is not None:
                    reserve.source.CopyFrom(prefix_source_to_proto(source))
            session.reserve(key, request, self)
        self._sessions[ask.number] = session

    def _write_sequence(self, message: types_pb2.SequenceSpec) -> None:
        """Writes the sequence into a message. The message of an earlier question is copied."""
        sequence = self._search.sequence
        if self._written is not None and self._written[0] is sequence:
            message.CopyFrom(self._written[1])
        else:
            fill_sequence_spec(message, sequence)
            self._written = sequence, message

    def _held(self, hold: act.Hold) -> None:
        self._sessions[hold.number].hold(self._key(hold.number), hold.lease_ms)
        self.ledger.holds(hold.worker_id, self._loop.time())

    def _taken(self, taken: act.Taken) -> None:
        plan = self._search.plan
        assert plan is not None, "workers of a plan were asked"
        self._answer = True
        self._checkpoint = self._search.fingerprint
        self.ledger.taken(taken, self._loop.time())
        placement, prefill, decode = taken.placement, taken.prefill_worker, taken.decode_worker
        self._worker = prefill
        self._prefetch.taken(prefill)
        assert self.receiver is not None, "the tokens have a receiver"
        maker = made_by(self._checkpoint, self._request.adapter)
        where = Placed(placement, prefill, decode, plan.cause, maker)
        self.receiver.placed(where)
        self._wake_up()

    def _unanswered(self, ask: act.Unanswered) -> None:
        self._mesh.sessions.gave_up(ask.candidate, ask.asked_at, self._loop.time())

    def _refused(self, refuse: act.Refuse) -> None:
        stage = Stage.PREFILL if refuse.side is Side.PREFILL else Stage.DECODE
        self._search.refused(stage, refuse.refusal, refuse.worker_id)

    def _exhausted(self, _: act.Exhausted) -> None:
        self._answer = False
        self._wake_up()

    def _delivered(self, deliver: act.Deliver) -> Actions | None:
        receiver, first, finish = self.receiver, deliver.first, deliver.finish_reason
        if receiver is None or not self._wants_more:
            return None  # an earlier action of the same event ended it at a stop string
        now = self._loop.time()
        if first is not None:
            self.ledger.first(first, self._num_sent, self._worker, now)
            if not self._tokens:
                cached_tokens = self.ledger.cached_tokens or 0
                receiver.first(cached_tokens, first.prompt_logprobs, first.embedding)
        self._tokens += deliver.token_ids
        if finish is not None:
            self.ledger.finished(now)
        if receiver.tokens(deliver.token_ids, deliver.logprobs, finish, now):
            return None
        self._wants_more = False
        self._wake_up()
        return self._attempt.cancel() if finish is None else None

    def _decoding(self, decoding: act.Decoding) -> None:
        self._sessions[decoding.number].release(self._key(decoding.number))
        self.ledger.decoding(decoding.worker_id, self._loop.time())
        self._set_timer()  # tokens may come before the handoff's end, and `takes` sets none

    def _forgotten(self, forget: act.Forget) -> None:
        session, key = self._sessions.pop(forget.number), self._key(forget.number)
        if forget.side is Side.PREFILL:
            session.prefill.forget(key)
        else:
            session.release(key)
            session.decode.forget(key)

    def _cancelled(self, cancel: act.Cancel) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        session, key = self._sessions.pop(cancel.number, None), self._key(cancel.number)
        if session is None:
            return  # the question was never sent
        if cancel.side is Side.PREFILL:
            session.cancel_prefill(key)
        else:
            session.cancel_decode(key)

    def _moved(self, move: act.Move) -> None:
        self._move = move
        self._wake_up()

    def _broken(self, broken: act.Break) -> None:
        self._error = StructureError(broken.text)
        self._wake_up()

    def _expired(self, _: act.Expire) -> None:
        limit_s = self._mesh.limits.request_timeout_s
        self._error = DeadlineError(f"the request ran for longer than {limit_s} s")
        self._wake_up()

    def _key(self, number: int) -> AttemptKey:
        return self._request.request_id, number

    async def _wait(self) -> None:
        """Waits until `_wake_up`."""
        self._wake = self._loop.create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


_PERFORM: Mapping[type, Callable[[Life, Any], Actions | None]] = {
    act.Ask: Life._asked,
    act.Hold: Life._held,
    act.Taken: Life._taken,
    act.Unanswered: Life._unanswered,
    act.Refuse: Life._refused,
    act.Exhausted: Life._exhausted,
    act.Deliver: Life._delivered,
    act.Decoding: Life._decoding,
    act.Forget: Life._forgotten,
    act.Cancel: Life._cancelled,
    act.Move: Life._moved,
    act.Break: Life._broken,
    act.Expire: Life._expired,
}
