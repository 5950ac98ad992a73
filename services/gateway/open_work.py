"""What one request has open at workers: a reservation, an offer, and their events.

Owns attempt numbers and cancels; decides nothing.
Tests: tests/integration/test_gateway_refusals.py.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from kvmesh.core.errors import LostError
from kvmesh.core.types import Candidate, Refusal, RefusalReason, RequestId, Reservation, WorkerId
from kvmesh.rpc.convert import reservation_to_proto
from kvmesh.rpc.convert_route import prefix_source_to_proto
from kvmesh.v1.decode_service_pb2 import DecodeRequest
from kvmesh.v1.prefill_service_pb2 import PrefillRequest
from kvmesh.v1.types_pb2 import SequenceSpec
from services.gateway.worker_events import (
    Accepted,
    Failed,
    Mailbox,
    Refused,
    Reserved,
    ShortWay,
    Started,
    Tokens,
    WorkerEvent,
)
from services.gateway.worker_sessions import AttemptKey, WorkerSession, WorkerSessions

ANSWER_TIMEOUT_S = 2.0
"""A worker that does not say yes or no for this long counts as lost."""


class Side(enum.Enum):
    """Which of a worker's two services an event is from."""

    PREFILL = "prefill"
    DECODE = "decode"


class ReservationLostError(LostError):
    """The reservation ended while the request was still looking for a prefill worker."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(slots=True)
class _Open:
    """An attempt that a worker knows of."""

    session: WorkerSession
    key: AttemptKey
    reservation: Reservation | None = None
    is_started: bool = False


@dataclass(slots=True)
class OpenWork:
    """One request's open attempts.

    Every reserve and every offer has a new attempt number; events of older ones are ignored.
    """

    request_id: RequestId
    sessions: WorkerSessions
    _mailbox: Mailbox = field(default_factory=Mailbox)
    _last_attempt: int = 0
    _decode: _Open | None = None
    _prefill: _Open | None = None
    # Decode may speak before the first token is here: they come over different connections.
    _early: list[Tokens] = field(default_factory=list)

    @property
    def reserved_at(self) -> WorkerId | None:
        """The worker that holds blocks for the request."""
        held = self._decode is not None and self._decode.reservation is not None
        return self._decode.session.worker_id if held and self._decode is not None else None

    @property
    def is_started(self) -> bool:
        """Whether a worker was asked for all in one; with the first token it decodes."""
        return self._decode is not None and self._decode.is_started

    async def reserve(
        self, candidate: Candidate, sequence: SequenceSpec, traceparent: str, timeout_s: float
    ) -> Refusal | None:
        """Asks a worker for blocks and a slot, giving up an older reservation.

        Returns:
            None when they are held, else why not.
        """
        message = DecodeRequest()
        message.reserve.sequence.CopyFrom(sequence)
        message.reserve.traceparent = traceparent
        answer = await self._reserve(candidate, message, timeout_s)
        return answer.refusal if isinstance(answer, Refused) else None

    async def start(
        self,
        candidate: Candidate,
        sequence: SequenceSpec,
        traceparent: str,
        ttft_budget_ms: int,
        timeout_s: float,
    ) -> Refused | None:
        """Asks a worker to reserve and to compute the prompt there, in one message.

        A worker that only reserves is offered the prompt afterwards.

        Returns:
            None when the worker took it, else why not; nothing is held then.
        """
        message = DecodeRequest()
        message.reserve.sequence.CopyFrom(sequence)
        message.reserve.traceparent = traceparent
        message.reserve.start_within_ms = ttft_budget_ms
        if candidate.source is not None:
            message.reserve.source.CopyFrom(prefix_source_to_proto(candidate.source))
        answer = await self._reserve(candidate, message, timeout_s)
        if isinstance(answer, Started):
            return None
        if isinstance(answer, Reserved):
            refused = await self.offer(candidate, sequence, traceparent, ttft_budget_ms, timeout_s)
            if refused is not None:
                self.cancel_decode()
            return refused
        return answer

    async def _reserve(
        self, candidate: Candidate, message: DecodeRequest, timeout_s: float
    ) -> Reserved | Started | Refused:
        self.cancel_decode()
        key = self._next_key()
        try:
            session = self.sessions.session(candidate)
            if not session.decode.stream.connected:
                await session.connected(session.decode)
            session.reserve(key, message, self._mailbox)
        except LostError as error:
            return Refused(_lost(str(error)))
        self._decode = _Open(session, key)
        answer = await self._answer(Side.DECODE, timeout_s)
        if isinstance(answer, (Reserved, Started)):
            held = answer.reservation if isinstance(answer, Reserved) else answer
            if held.worker_id == candidate.worker_id:
                if isinstance(answer, Reserved):
                    self._decode.reservation = answer.reservation
                else:
                    self._decode.is_started = True
                session.hold(key, held.lease_ms)
                return answer
            # Another worker took over the address; the fleet view will catch up.
            answer = Refused(_lost(f"{held.worker_id} answered for {candidate.worker_id}"))
        assert isinstance(answer, Refused), "decode answers with a reservation or a refusal"
        self.cancel_decode()
        return answer

    async def offer(
        self,
        candidate: Candidate,
        sequence: SequenceSpec,
        traceparent: str,
        ttft_budget_ms: int,
        timeout_s: float,
    ) -> Refused | None:
        """Offers the prompt to a worker, for the reservation that is held.

        Returns:
            None when the worker took it, else why not. The reservation is given up when the worker
            was shown it and did not answer: it may be writing there, and would beside the next one.

        Raises:
            ReservationLostError: the reservation ended meanwhile; it is given up.
        """
        assert self._decode is not None, "an offer needs a reservation"
        assert self._decode.reservation is not None, "an offer needs a reservation"
        key = self._next_key()
        message = PrefillRequest()
        message.offer.sequence.CopyFrom(sequence)
        message.offer.reservation.CopyFrom(reservation_to_proto(self._decode.reservation))
        message.offer.ttft_budget_ms = ttft_budget_ms
        message.offer.traceparent = traceparent
        if candidate.source is not None:
            message.offer.source.CopyFrom(prefix_source_to_proto(candidate.source))
        try:
            session = self.sessions.session(candidate)
            await session.connected(session.prefill)
            session.offer(key, message, self._mailbox)
        except LostError as error:
            return Refused(_lost(str(error)), by_prefill=True)
        self._prefill = _Open(session, key)
        try:
            answer = await self._answer(Side.PREFILL, timeout_s)
        except ReservationLostError:
            self.close()
            raise
        if isinstance(answer, Refused):
            self.cancel_prefill()
            if answer.refusal.reason is RefusalReason.LOST:
                self.cancel_decode()
            return Refused(answer.refusal, by_prefill=True)
        return None

    def open_short_way(self, way: ShortWay) -> None:
        """Offers the decode worker's tokens to `way` until the next event."""
        if self._decode is not None:
            self._mailbox.open_short_way(self._decode.key[1], way)

    async def next_event(self, timeout_s: float) -> tuple[Side, WorkerEvent]:
        """The next event of the open attempts.

        Raises:
            TimeoutError: nothing came.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while True:
            attempt, event = await self._mailbox.take(until - loop.time())
            if self._prefill is not None and attempt == self._prefill.key[1]:
                return Side.PREFILL, event
            if self._decode is not None and attempt == self._decode.key[1]:
                # Both sides speak for an attempt that was started as one.
                by_prefill = isinstance(event, Failed) and event.by_prefill
                return Side.PREFILL if by_prefill else Side.DECODE, event

    def keep_early(self, tokens: Tokens) -> None:
        """Puts tokens aside until the first token is here."""
        self._early.append(tokens)

    def take_early(self) -> list[Tokens]:
        """The tokens put aside, in order."""
        early, self._early = self._early, []
        return early

    def prefill_is_over(self) -> None:
        """The prefill worker has nothing more to say: nothing to cancel there."""
        if self._prefill is not None:
            self._prefill.session.prefill.forget(self._prefill.key)
            self._prefill = None

    def reservation_is_used(self) -> None:
        """The sequence runs: its reservation needs no renewal any more."""
        if self._decode is not None:
            self._decode.session.release(self._decode.key)

    def decode_is_over(self) -> None:
        """The decode worker has sent the last token: nothing to cancel there."""
        if self._decode is not None:
            self.reservation_is_used()
            self._decode.session.decode.forget(self._decode.key)
            self._decode = None

    def cancel_prefill(self) -> None:
        """Ends what is open at the prefill worker."""
        if self._prefill is not None:
            self._prefill.session.cancel_prefill(self._prefill.key)
            self._prefill = None

    def cancel_decode(self) -> None:
        """Ends what is open at the decode worker."""
        if self._decode is not None:
            self._decode.session.cancel_decode(self._decode.key)
            self._decode = None

    def close(self) -> None:
        """Ends everything that is open. May be called again."""
        self.cancel_prefill()
        self.cancel_decode()
        self._early.clear()

    def _next_key(self) -> AttemptKey:
        self._last_attempt += 1
        return self.request_id, self._last_attempt

    async def _answer(
        self, side: Side, timeout_s: float
    ) -> Accepted | Reserved | Started | Refused:
        """Waits for yes or no."""
        loop = asyncio.get_running_loop()
        until = loop.time() + min(timeout_s, ANSWER_TIMEOUT_S)
        while True:
            try:
                source, event = await self.next_event(until - loop.time())
            except TimeoutError:
                if timeout_s < ANSWER_TIMEOUT_S:  # the request ran out of time, not the worker
                    message = "the deadline passed before the worker answered"
                    return Refused(Refusal(RefusalReason.DEADLINE, message))
                return Refused(_lost("the worker did not answer in time"))
            if isinstance(event, Tokens):
                self.keep_early(event)
            elif isinstance(event, Failed) and source is not side:
                raise ReservationLostError(event.refusal)
            elif isinstance(event, Failed):
                return Refused(event.refusal, event.by_prefill)
            elif isinstance(event, (Accepted, Refused, Reserved, Started)):
                return event


def _lost(message: str) -> Refusal:
    return Refusal(RefusalReason.LOST, message)
