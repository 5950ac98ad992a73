"""Connections to workers: one prefill and one decode stream each, shared by all requests.

Owns the streams, passes each event to its request, and renews the leases of reservations that wait
for their KV.
Tests: tests/integration/test_gateway_http.py, tests/unit/gateway/wire/test_link.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import grpc

from kvmesh.core.errors import LostError, ProtocolError
from kvmesh.core.types import (
    BlockHash,
    Candidate,
    Endpoint,
    Refusal,
    RefusalReason,
    RequestId,
    WorkerId,
)
from kvmesh.kv.hashing import join_hashes
from kvmesh.policy.answer_times import AnswerTimes, WorkerAnswers
from kvmesh.rpc.channels import NO_ACCESS, MeshAccess, open_channel
from kvmesh.rpc.direct import DirectClient
from kvmesh.rpc.stream import PeerStream
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1.decode_service_pb2 import (
    DecodeCancel,
    DecodeRenew,
    DecodeRequest,
    DecodeResponse,
    DecodeTokens,
)
from kvmesh.v1.decode_service_pb2_grpc import DecodeServiceStub
from kvmesh.v1.prefill_service_pb2 import (
    PrefillCancel,
    PrefillPrefetch,
    PrefillRequest,
    PrefillResponse,
)
from kvmesh.v1.prefill_service_pb2_grpc import PrefillServiceStub
from services.gateway.wire.worker_events import (
    Failed,
    Tokens,
    WorkerEvent,
    decode_event,
    prefill_event,
)

log = event_logger(__name__)

CONNECT_WAIT_S = 0.5
"""Seconds that a request waits for a connection that was just opened."""

RENEWALS_PER_LEASE = 3

AttemptKey = tuple[RequestId, int]


class Taker(Protocol):
    """Takes a worker's events about an attempt."""

    def takes(self, attempt: int, tokens: Tokens) -> None:
        """Takes tokens without log-probabilities, not the last ones of an attempt."""
        ...

    def put(self, attempt: int, event: WorkerEvent) -> None:
        """Takes an event of an attempt."""
        ...


class Link:
    """One stream to one worker, and the takers of the attempts that use it.

    Plain tokens wait until the end of the event-loop iteration, and those of one attempt are then
    delivered together: one token while the gateway keeps up, more when it is behind. An attempt's
    events keep their order. Why: docs/adr/0058-joined-tokens.md.

    Args:
        name: for logs.
        open_call: the stub's method.
        parse: turns one event message into a value.
        is_prefill: it leads to the worker's prefill service; else to decode, which sends tokens.
        direct: connects to the socket that the worker offers beside gRPC.
        times: answer times of all workers.

    Attributes:
        answers: questions to the worker on this stream. Its first event about an attempt is the
            answer.
    """

    def __init__(
        self,
        name: str,
        open_call: Callable[..., Any],
        parse: Callable[[Any], WorkerEvent],
        *,
        is_prefill: bool,
        direct: DirectClient | None = None,
        times: AnswerTimes,
    ) -> None:
        self.answers = WorkerAnswers()
        self._times = times
        self._parse = parse
        self._is_prefill = is_prefill
        self._takers: dict[AttemptKey, Taker] = {}
        self._waiting: dict[AttemptKey, tuple[int, list[int]]] = {}
        self._loop = asyncio.get_running_loop()
        self.stream: PeerStream[Any, Any] = PeerStream(
            name, open_call, self._receive, on_down=self._fail_all, joins=True, direct=direct
        )

    @property
    def num_open(self) -> int:
        """Number of registered attempts."""
        return len(self._takers)

    def open(self, key: AttemptKey, taker: Taker, message: Any) -> None:
        """Registers an attempt and sends its first message.

        Raises:
            LostError: the worker is not connected; nothing is registered.
        """
        self.stream.send(message)
        self._takers[key] = taker
        self.answers.asked(key, self._loop.time())

    def forget(self, key: AttemptKey) -> bool:
        """Ends the registration of an attempt; False if it had ended already."""
        return self._takers.pop(key, None) is not None

    def cancel(self, key: AttemptKey, message: Any) -> None:
        """Ends an attempt and tells the worker; nothing happens if it had ended already."""
        if self.forget(key):
            # If the connection broke, the worker has already cancelled the attempt.
            with contextlib.suppress(LostError):
                self.stream.send(message)

    def _receive(self, response: Any) -> None:
        for message in response.events:
            key = (message.request_id, message.attempt)
            if key not in self._takers:
                self._answered(key)  # its attempt ended here before the worker knew
                continue
            if not self._is_prefill and self._waits(key, message.tokens):
                continue
            self._answered(key)
            try:
                event = self._parse(message)
            except ProtocolError as error:
                log.warning("bad_worker_event", peer=self.stream.name, error=str(error))
                refusal = Refusal(RefusalReason.LOST, str(error), work_done=True)
                event = Failed(refusal, self._is_prefill)
            self._deliver(key)
            taker = self._takers.get(key)
            if taker is not None:
                taker.put(message.attempt, event)

    def _answered(self, key: AttemptKey) -> None:
        now = self._loop.time()
        seconds = self.answers.answered(key, now)
        if seconds is not None:
            self._times.note(seconds, now)

    def _waits(self, key: AttemptKey, tokens: DecodeTokens) -> bool:
        """Keeps tokens until the end of the iteration; False if they are not plain."""
        token_ids = tokens.token_ids  # empty in other events
        if not token_ids or tokens.finish_reason or tokens.logprobs:
            return False
        first_position, found = tokens.first_position, self._waiting.get(key)
        if found is not None:
            if first_position == found[0] + len(found[1]):
                found[1].extend(token_ids[:])
                return True
            self._deliver(key)
        if not self._waiting:
            self._loop.call_soon(self._deliver_all)
        self._waiting[key] = first_position, token_ids[:]  # a list, in a third of `list`'s time
        return True

    def _deliver(self, key: AttemptKey) -> None:
        """Delivers the tokens of one attempt that wait."""
        found = self._waiting.pop(key, None)
        taker = self._takers.get(key)
        if found is not None and taker is not None:
            taker.takes(key[1], Tokens(*found))

    def _deliver_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for key, (first_position, token_ids) in waiting.items():
            taker = self._takers.get(key)
            if taker is not None:
                taker.takes(key[1], Tokens(first_position, token_ids))

    def _fail_all(self, reason: str) -> None:
        self._deliver_all()
        self.answers.forget()
        refusal = Refusal(
            RefusalReason.LOST, f"connection to {self.stream.name} broke: {reason}", work_done=True
        )
        ended, self._takers = self._takers, {}
        for (_, attempt), taker in ended.items():
            taker.put(attempt, Failed(refusal, self._is_prefill))


class WorkerSession:
    """The two streams to one worker.

    Attributes:
        worker_id: the worker.
        endpoint: its control endpoint.
        prefill, decode: its streams.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        endpoint: Endpoint,
        channel: grpc.aio.Channel,
        times: AnswerTimes,
        access: MeshAccess = NO_ACCESS,
    ) -> None:
        self.worker_id = worker_id
        self.endpoint = endpoint
        self.prefill = Link(
            f"{worker_id} (prefill)",
            PrefillServiceStub(channel).Prefill,
            prefill_event,
            is_prefill=True,
            direct=DirectClient(endpoint.host, PrefillResponse, access.tls),
            times=times,
        )
        self.decode = Link(
            f"{worker_id} (decode)",
            DecodeServiceStub(channel).Decode,
            lambda message: decode_event(message, worker_id),
            is_prefill=False,
            direct=DirectClient(endpoint.host, DecodeResponse, access.tls),
            times=times,
        )
        self._times = times
        self._channel = channel
        self._held: dict[AttemptKey, float] = {}
        self._holding = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._started_at = loop.time()
        self._tasks = [
            loop.create_task(work, name=f"worker session {worker_id}")
            for work in (self.prefill.stream.run(), self.decode.stream.run(), self._renew())
        ]

    @property
    def num_open(self) -> int:
        """Number of attempts open at this worker."""
        return self.prefill.num_open + self.decode.num_open

    @property
    def num_held(self) -> int:
        """Number of reservations that are being renewed."""
        return len(self._held)

    @property
    def is_late(self) -> bool:
        """Whether an answer of the worker is overdue."""
        now = asyncio.get_running_loop().time()
        return any(
            link.answers.is_late(self._times.wait_s(link.answers), now)
            for link in (self.prefill, self.decode)
            if link.answers.has_open
        )

    def reserve(self, key: AttemptKey, message: DecodeRequest, taker: Taker) -> None:
        """Asks for blocks and a slot.

        Raises:
            LostError: the worker is not connected.
        """
        message.reserve.request_id, message.reserve.attempt = key
        self.decode.open(key, taker, message)

    def offer(self, key: AttemptKey, message: PrefillRequest, taker: Taker) -> None:
        """Offers a prompt.

        Raises:
            LostError: the worker is not connected.
        """
        message.offer.request_id, message.offer.attempt = key
        self.prefill.open(key, taker, message)

    def prefetch(self, request_id: RequestId, hashes: Sequence[BlockHash]) -> None:
        """Announces a prompt that may be offered, and its blocks that the worker's tiers hold.

        Raises:
            LostError: the worker is not connected.
        """
        message = PrefillPrefetch(request_id=request_id, block_hashes=join_hashes(hashes))
        self.prefill.stream.send(PrefillRequest(prefetch=message))

    def end_prefetch(self, request_id: RequestId) -> None:
        """Tells the worker that the prompt will not be offered. A broken connection implies it."""
        with contextlib.suppress(LostError):
            cancel = PrefillCancel(request_id=request_id)
            self.prefill.stream.send(PrefillRequest(cancel=cancel))

    def cancel_decode(self, key: AttemptKey) -> None:
        """Ends a reservation or a running sequence."""
        self.release(key)
        message = DecodeRequest(cancel=DecodeCancel(request_id=key[0], attempt=key[1]))
        self.decode.cancel(key, message)

    def cancel_prefill(self, key: AttemptKey) -> None:
        """Ends an offer or a running prompt."""
        message = PrefillRequest(cancel=PrefillCancel(request_id=key[0], attempt=key[1]))
        self.prefill.cancel(key, message)

    def hold(self, key: AttemptKey, lease_ms: int) -> None:
        """Renews a reservation until `release`."""
        if lease_ms > 0:
            self._held[key] = lease_ms / 1000
            self._holding.set()

    def release(self, key: AttemptKey) -> None:
        """Stops renewing a reservation."""
        self._held.pop(key, None)

    def may_connect_s(self) -> float:
        """Seconds to wait for a connection; more than 0 only while the session is new."""
        return self._started_at + CONNECT_WAIT_S - asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Ends the streams; open attempts get a Failed event."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _renew(self) -> None:
        while True:
            await self._holding.wait()
            while self._held:
                await asyncio.sleep(min(self._held.values()) / RENEWALS_PER_LEASE)
                names = sorted({request_id for request_id, _ in self._held})
                if names:
                    # A broken stream has already failed its reservations: nothing is left to renew.
                    with contextlib.suppress(LostError):
                        self.decode.stream.send(DecodeRequest(renew=DecodeRenew(request_ids=names)))
            self._holding.clear()


class WorkerSessions:
    """All sessions, by worker.

    Attributes:
        times: answer times of all workers.
    """

    def __init__(self, access: MeshAccess = NO_ACCESS) -> None:
        self.times = AnswerTimes()
        self._unanswered: set[WorkerSession] = set()
        self._access = access
        self._sessions: dict[WorkerId, WorkerSession] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._closed = False

    def session(self, candidate: Candidate) -> WorkerSession:
        """Returns the session of a worker.

        Opens one if there is none; replaces it if the address changed.

        Raises:
            LostError: the gateway is closing.
        """
        if self._closed:
            raise LostError("the gateway is closing")
        known = self._sessions.get(candidate.worker_id)
        if known is not None and known.endpoint == candidate.control_endpoint:
            return known
        if known is not None:
            self._retire(known)
        endpoint = candidate.control_endpoint
        channel = open_channel(str(endpoint), self._access)
        session = WorkerSession(candidate.worker_id, endpoint, channel, self.times, self._access)
        self._sessions[candidate.worker_id] = session
        return session

    def gave_up(self, candidate: Candidate, asked_at: float, now: float) -> None:
        """Notes that a worker did not answer a question in time."""
        self.times.note_late(asked_at, now)
        session = self._sessions.get(candidate.worker_id)
        if session is not None:
            self._unanswered.add(session)

    def unanswered(self) -> frozenset[WorkerId]:
        """Workers that did not answer a question in time, and have answered none since."""
        if not self._unanswered:
            return frozenset()
        self._unanswered = {each for each in self._unanswered if each.is_late}
        return frozenset(each.worker_id for each in self._unanswered)

    def late_last(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The candidates in the same order, but those whose answers are overdue come last.

        Those of `unanswered` are left out while there are others: busy workers are free sooner than
        the gateway gives up on one that does not answer.
        """
        late = {each.worker_id for each in candidates if self._is_late(each.worker_id)}
        if not late:
            return candidates
        unanswered = self.unanswered()
        answering = [each for each in candidates if each.worker_id not in unanswered]
        return sorted(answering or candidates, key=lambda each: each.worker_id in late)

    def _is_late(self, worker_id: WorkerId) -> bool:
        session = self._sessions.get(worker_id)
        return session is not None and session.is_late

    def keep(self, live: Collection[Candidate]) -> None:
        """Connects to live workers before they are needed.

        Drops idle sessions of workers that left.
        """
        if self._closed:
            return
        for candidate in live:
            self.session(candidate)
        names = {candidate.worker_id for candidate in live}
        for session in tuple(self._sessions.values()):
            if session.worker_id not in names and session.num_open == 0:
                del self._sessions[session.worker_id]
                self._retire(session)

    def give_up(self, names: Collection[WorkerId]) -> None:
        """Closes the sessions of workers that stopped computing; their attempts fail at once."""
        for name in names & self._sessions.keys():
            self._retire(self._sessions.pop(name))

    def in_flight(self) -> dict[WorkerId, int]:
        """This gateway's open attempts at each worker."""
        return {worker_id: session.num_open for worker_id, session in self._sessions.items()}

    @property
    def num_connected(self) -> int:
        """Number of workers to which both streams are up."""
        return sum(
            session.prefill.stream.connected and session.decode.stream.connected
            for session in self._sessions.values()
        )

    @property
    def num_open(self) -> int:
        """Attempts open at all workers; zero when no request runs."""
        return sum(session.num_open for session in self._sessions.values())

    @property
    def num_held(self) -> int:
        """Reservations being renewed at all workers; zero when no request runs."""
        return sum(session.num_held for session in self._sessions.values())

    async def close(self) -> None:
        """Closes all sessions; no new ones are made."""
        self._closed = True
        for session in self._sessions.values():
            self._retire(session)
        self._sessions = {}
        await asyncio.gather(*self._retiring)

    def _retire(self, session: WorkerSession) -> None:
        self._unanswered.discard(session)
        task = asyncio.get_running_loop().create_task(session.close())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
