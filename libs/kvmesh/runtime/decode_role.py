"""The decode side of a worker: reservations, arriving KV, the stream of tokens.

Owns every sequence between `DecodeReserve` and its last token. The handoff's rules are in
`kv/handoff.py`; this is the shell that gives it a clock, memory and peers.
Tests: tests/integration/test_worker.py.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc

from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import (
    Endpoint,
    HostRoute,
    Refusal,
    RefusalReason,
    RequestId,
    Reservation,
    WorkerId,
)
from kvmesh.engine.sequence import Emission, Sequence
from kvmesh.kv.block_parts import Part
from kvmesh.kv.handoff import HandoffTable
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.kv.runs import consecutive_runs
from kvmesh.rpc.convert import (
    finish_reason_to_proto,
    refusal_to_proto,
    reservation_to_proto,
    sequence_spec_from_proto,
)
from kvmesh.rpc.convert_sampling import token_logprobs_to_proto
from kvmesh.rpc.outbox import Outbox
from kvmesh.rpc.served import DirectWay, serve_stream
from kvmesh.runtime.local_start import LocalPrefill, StartedOutbox
from kvmesh.runtime.worker_parts import WorkerParts
from kvmesh.telemetry.logs import event_logger
from kvmesh.telemetry.tracing import Span, start_span
from kvmesh.transfer.device import DevicePool, pieces_of
from kvmesh.transfer.frames import CommitFrame, PutFrame
from kvmesh.transfer.lane import claim_of
from kvmesh.transfer.memory import write_views
from kvmesh.transfer.target import WriteGrant
from kvmesh.v1 import decode_service_pb2 as pb
from kvmesh.v1 import decode_service_pb2_grpc

log = event_logger(__name__)

DecodeOutbox = Outbox[pb.DecodeEvent]

_EXPIRY_INTERVAL_S = 0.25


@dataclass(eq=False, slots=True)
class DecodeTask:
    """One request on this worker, from its reservation to its last token.

    Attributes:
        arriving: blocks that the handoff writes, in order.
        reservation_id: None once decode has taken the blocks over.
        stop_prefill: ends the prompt that was started with the reservation.
    """

    outbox: DecodeOutbox
    request_id: RequestId
    attempt: int
    sequence: Sequence
    span: Span
    arriving: list[int]
    reservation_id: int | None = None
    local_write: int | None = None
    stop_prefill: Callable[[], None] | None = None


class DecodeRole(decode_service_pb2_grpc.DecodeServiceServicer):
    """Serves `DecodeService` and receives KV (`transfer.target.WriteTarget`)."""

    def __init__(self, parts: WorkerParts, *, slots: int, lease_s: float) -> None:
        self._identity = parts.identity
        self._direct: DirectWay[pb.DecodeEvent] = DirectWay(
            parts.direct, pb.DecodeRequest, lambda events: (pb.DecodeResponse(events=events),)
        )
        self._core = parts.core
        self._memory = parts.memory
        self._clock = parts.clock
        self._wake_engine = parts.wake_engine
        self._on_change = parts.on_change
        self._metrics = parts.metrics
        self._slots = slots
        self._lease_s = lease_s
        self._block_bytes = parts.core.spec.layout.block_bytes
        self._handoff = HandoffTable(parts.identity.incarnation, lease_s, self._block_bytes)
        self._tasks: dict[tuple[DecodeOutbox, RequestId, int], DecodeTask] = {}
        self._by_reservation: dict[int, DecodeTask] = {}
        # Ended by us, but a writer may still be in the blocks.
        self._fenced: dict[int, Sequence] = {}
        self._grants: dict[WriteGrant, list[int]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self.data_endpoint: Endpoint | None = None
        """Where reservations are written to; set when the data server listens."""
        self.local_prefill: LocalPrefill | None = None
        """Starts prompts with their reservation; sets itself."""
        self.host_route: HostRoute | None = None
        """The way there for senders on this host."""

    # --- the stream --------------------------------------------------------------------------

    async def Decode(
        self,
        request_iterator: AsyncIterator[pb.DecodeRequest],
        context: grpc.aio.ServicerContext[pb.DecodeRequest, pb.DecodeResponse],
    ) -> AsyncIterator[pb.DecodeResponse]:
        """One gateway's stream; everything on it is cancelled when it ends."""
        async for events in serve_stream(
            request_iterator, context, self._receive, self._stream_ended, self._direct
        ):
            yield pb.DecodeResponse(events=events)

    def _stream_ended(self, outbox: DecodeOutbox) -> None:
        for task in [task for task in self._tasks.values() if task.outbox is outbox]:
            self._end(task, "stream_closed")

    def _receive(self, request: pb.DecodeRequest, outbox: DecodeOutbox) -> None:
        kind = request.WhichOneof("message")
        if kind == "reserve":
            self._reserve(request.reserve, outbox)
        elif kind == "renew":
            names = set(request.renew.request_ids)
            for task in self._tasks.values():
                if task.outbox is outbox and task.request_id in names and task.reservation_id:
                    self._handoff.renew(task.reservation_id, self._clock.now())
        elif kind == "cancel":
            key = (outbox, RequestId(request.cancel.request_id), request.cancel.attempt)
            if key in self._tasks:
                self._end(self._tasks[key], "cancelled")

    # --- reserve -----------------------------------------------------------------------------

    def _reserve(self, message: pb.DecodeReserve, outbox: DecodeOutbox) -> None:
        request_id = RequestId(message.request_id)
        span = start_span(
            "decode.request",
            message.traceparent,
            request_id=request_id,
            worker_id=self._identity.worker_id,
        )
        prefill = self.local_prefill if message.start_within_ms else None
        busy = None if prefill is None else prefill.turn_away()
        outcome = busy or self._try_reserve(message, outbox, span)
        event = pb.DecodeEvent(request_id=request_id, attempt=message.attempt)
        if isinstance(outcome, Refusal):
            span.event("refused", reason=outcome.reason.value)
            span.end()
            self._metrics.reservations.labels("refused", outcome.reason.value).inc()
            refused = event.refused if busy is None else event.prefill.rejected
            refused.CopyFrom(refusal_to_proto(outcome))
            outbox.put(event)
            return
        span.event("reserved", blocks=outcome.num_blocks, cached=outcome.num_cached_blocks)
        self._metrics.reservations.labels("reserved", "").inc()
        if prefill is None:
            event.reserved.CopyFrom(reservation_to_proto(outcome))
            outbox.put(event)
            return
        # Nobody else writes there, so nobody is told how.
        event.reserved.worker_id = outcome.worker_id
        event.reserved.incarnation = outcome.incarnation
        event.reserved.lease_ms = outcome.lease_ms
        task = self._tasks[outbox, request_id, message.attempt]
        task.stop_prefill = prefill.start_reserved(message, outcome, StartedOutbox(event, outbox))
        if task.stop_prefill is None:
            self._end(task, "rejected")

    def _try_reserve(
        self, message: pb.DecodeReserve, outbox: DecodeOutbox, span: Span
    ) -> Reservation | Refusal:
        key = (outbox, RequestId(message.request_id), message.attempt)
        if self.draining:
            return Refusal(RefusalReason.DRAINING, "this worker is leaving")
        if key in self._tasks:
            return Refusal(RefusalReason.INVALID, "this attempt is already reserved")
        if len(self._tasks) >= self._slots:
            text = f"all {self._slots} decode slots are taken"
            return Refusal(RefusalReason.NO_SLOTS, text, retry_after_ms=50)
        try:
            spec = sequence_spec_from_proto(message.sequence)
        except ProtocolError as error:
            return Refusal(RefusalReason.INVALID, str(error))
        sequence = self._core.admit_decode(spec)
        if isinstance(sequence, Refusal):
            return sequence
        num_cached_blocks = sequence.num_cached // self._core.block_size
        arriving = self._core.arriving_blocks(sequence, num_cached_blocks)
        blocks = [each.block for each in arriving]
        task = DecodeTask(outbox, key[1], message.attempt, sequence, span, blocks)
        reservation = self._open_handoff(task)
        self._tasks[key] = task
        self._idle.clear()
        self._on_change()
        return reservation

    def _open_handoff(self, task: DecodeTask) -> Reservation:
        capability = secrets.token_bytes(16)
        assert self.data_endpoint is not None, "the data server is not up"
        reservation_id = self._handoff.reserve(
            task.request_id,
            task.arriving,
            0,  # what is cached is not among them
            capability,
            task.attempt,
            self._clock.now(),
        )
        task.reservation_id = reservation_id
        self._by_reservation[reservation_id] = task
        return Reservation(
            reservation_id=reservation_id,
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            generation=task.attempt,
            capability=capability,
            data_endpoint=self.data_endpoint,
            num_cached_blocks=task.sequence.num_cached // self._core.block_size,
            num_blocks=len(task.arriving),
            lease_ms=int(self._lease_s * 1000),
            host_route=self.host_route,
            run_lengths=tuple(count for _, count in consecutive_runs(task.arriving)),
        )

    # --- arriving KV (WriteTarget) -----------------------------------------------------------

    def begin_write(self, put: PutFrame) -> WriteGrant | Refusal:
        """Memory for the runs of a PUT, if the handoff table lets it in."""
        write_ids: list[int] = []
        granted_runs: list[tuple[int, int]] = []
        part = None if put.part is None else Part(*put.part)
        for run in put.runs:
            granted = self._handoff.begin_write(
                put.claim,
                run.first,
                run.count,
                self._clock.now(),
                part,
            )
            if isinstance(granted, Refusal):
                for write_id in write_ids:
                    self._handoff.end_write(write_id, ok=False)
                self._release_quiet()
                return granted
            write_ids.append(granted.write_id)
            granted_runs += consecutive_runs(granted.blocks)
        if isinstance(self._memory, DevicePool):
            grant = WriteGrant(put, (), pieces_of(granted_runs, self._block_bytes, put.part))
        else:
            views = write_views(self._memory, granted_runs, self._block_bytes, put.part)
            grant = WriteGrant(put, views)
        self._grants[grant] = write_ids
        return grant

    def end_write(self, grant: WriteGrant, ok: bool) -> None:
        """The channel left the memory."""
        task = self._by_reservation.get(grant.put.claim.reservation_id)
        if ok and task is not None and grant.pieces is None:
            for run in grant.put.runs:
                blocks = task.arriving[run.first : run.first + run.count]
                for first, count in consecutive_runs(blocks):
                    self._memory.written(first, count)
        for write_id in self._grants.pop(grant):
            self._handoff.end_write(write_id, ok)
        self._release_quiet()

    def commit(self, frame: CommitFrame) -> Refusal | None:
        """Starts decode on a complete handoff; a repeated commit gets the same answer."""
        task = self._by_reservation.get(frame.claim.reservation_id)
        if task is not None and not 0 <= frame.first_token_id < self._core.spec.vocab_size:
            text = f"first token {frame.first_token_id} is outside the vocabulary"
            return Refusal(RefusalReason.INVALID, text)
        outcome = self._handoff.commit(frame.claim, self._clock.now())
        if isinstance(outcome, Refusal):
            return outcome
        if task is not None:
            self._take(task)
            self._core.start_decode(task.sequence, frame.first_token_id)
            self._wake_engine()
        return None

    def claimed_blocks(self, claim: WriteClaim) -> list[int] | Refusal:
        """The blocks that a reservation found cached here, for queries about them."""
        refusal = self._handoff.check_claim(claim, self._clock.now())
        if refusal is not None:
            return refusal
        task = self._by_reservation.get(claim.reservation_id)
        if task is None:
            return Refusal(RefusalReason.STALE, "decode has taken the blocks over")
        return task.sequence.blocks[: task.sequence.num_cached // self._core.block_size]

    def peer_lost(self, worker_id: WorkerId) -> None:
        """Nothing to undo: unfinished writes were ended, and leases end what is left."""
        log.info("data_peer_lost", peer=worker_id)

    def _take(self, task: DecodeTask) -> None:
        assert task.reservation_id is not None
        taken = self._handoff.take(task.reservation_id)
        assert not isinstance(taken, Refusal), taken
        del self._by_reservation[task.reservation_id]
        task.reservation_id = None
        task.span.event("committed")
        self._on_change()  # it runs, and waits for its KV no more: planner loops tell them apart
        task.sequence.on_emission = lambda emission: self._emit(task, emission)

    # --- prefill on this worker --------------------------------------------------------------

    def start_local(
        self,
        reservation: Reservation,
        on_first: Callable[[Emission], None],
        *,
        held: bool = False,
    ) -> Sequence | Refusal:
        """Computes a reserved prompt right in its blocks (aggregated placement).

        Args:
            on_first: called with the first token; the handoff is committed by then.
            held: the caller lets it run.
        """
        task = self._by_reservation.get(reservation.reservation_id)
        now = self._clock.now()
        granted = self._handoff.begin_write(claim_of(reservation), 0, reservation.num_blocks, now)
        if isinstance(granted, Refusal):
            return granted
        assert task is not None
        task.local_write = granted.write_id
        task.sequence.on_emission = lambda emission: self._first_local(
            task, reservation, emission, on_first
        )
        if not held:
            self._core.run(task.sequence)
            self._wake_engine()
        return task.sequence

    def _first_local(
        self,
        task: DecodeTask,
        reservation: Reservation,
        emission: Emission,
        on_first: Callable[[Emission], None],
    ) -> None:
        assert task.local_write is not None
        self._handoff.end_write(task.local_write, ok=True)
        task.local_write = None
        if emission.finish_reason is None:
            outcome = self._handoff.commit(claim_of(reservation), self._clock.now())
            if isinstance(outcome, Refusal):  # the lease ended while the prompt was computed
                self._fail(task, outcome)
                on_first(emission)
                return
            self._take(task)
        on_first(emission)

    # --- tokens and ends ---------------------------------------------------------------------

    def _emit(self, task: DecodeTask, emission: Emission) -> None:
        tokens = pb.DecodeTokens(
            first_position=emission.position,
            token_ids=[emission.token_id],
            finish_reason=finish_reason_to_proto(emission.finish_reason),
            error=emission.error,
        )
        if emission.logprobs is not None:
            tokens.logprobs.append(token_logprobs_to_proto(emission.logprobs))
        task.outbox.put(
            pb.DecodeEvent(request_id=task.request_id, attempt=task.attempt, tokens=tokens)
        )
        if emission.position == len(task.sequence.spec.token_ids) + 1:
            task.span.event("first_decode")
        if emission.finish_reason is not None:
            self._end(task, emission.finish_reason.value)

    def _fail(self, task: DecodeTask, refusal: Refusal) -> None:
        task.outbox.put(
            pb.DecodeEvent(
                request_id=task.request_id,
                attempt=task.attempt,
                failed=refusal_to_proto(refusal),
            )
        )
        self._end(task, refusal.reason.value)

    def _end(self, task: DecodeTask, why: str) -> None:
        del self._tasks[task.outbox, task.request_id, task.attempt]
        generated = len(task.sequence.tokens) - len(task.sequence.spec.token_ids)
        task.span.set(outcome=why, generated_tokens=generated)
        task.span.end()
        log.debug(
            "decode_finished",
            request_id=task.request_id,
            trace_id=task.span.trace_id,
            outcome=why,
            generated_tokens=generated,
        )
        if task.reservation_id is None:
            self._core.release(task.sequence)
        else:
            self._fence(task.reservation_id)
            self._handoff.cancel(task.reservation_id)
            if task.local_write is not None:
                if task.stop_prefill is not None:
                    task.stop_prefill()
                # The engine is this writer: it is out of the blocks when `release` frees them.
                self._core.release(task.sequence)
                self._handoff.end_write(task.local_write, ok=False)
                task.sequence.on_progress()  # the prefill side waits for a first token
            self._release_quiet()
        if not self._tasks:
            self._idle.set()
        self._on_change()

    def _fence(self, reservation_id: int) -> None:
        task = self._by_reservation.pop(reservation_id, None)
        if task is not None:
            self._fenced[reservation_id] = task.sequence

    def _release_quiet(self) -> None:
        """Frees the blocks of ended reservations whose writers are gone."""
        for released in self._handoff.drain_released():
            self._core.release(self._fenced.pop(released.reservation_id))

    async def watch_leases(self) -> None:
        """Ends reservations that nobody renews."""
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            self.expire_leases()

    def expire_leases(self) -> None:
        """Ends reservations whose lease ran out, with a word to the gateway."""
        before = list(self._by_reservation.items())
        if not self._handoff.expire(self._clock.now()):
            return
        ended = [(number, task) for number, task in before if not self._handoff.is_open(number)]
        # All of them first: the end of each releases what is quiet, whoever's it is.
        for reservation_id, _ in ended:
            self._fence(reservation_id)
        for _, task in ended:
            log.warning(
                "reservation_expired", request_id=task.request_id, trace_id=task.span.trace_id
            )
            self._fail(task, Refusal(RefusalReason.STALE, "the reservation's lease ended"))

    # --- state -------------------------------------------------------------------------------

    @property
    def num_reserved(self) -> int:
        """Requests that wait for their KV."""
        return len(self._by_reservation)

    @property
    def num_tasks(self) -> int:
        """Requests on this worker."""
        return len(self._tasks)

    @property
    def is_idle(self) -> bool:
        """No request, no reservation, no write is left."""
        return not (self._tasks or self._fenced or self._grants) and self._handoff.is_idle

    async def drain(self) -> None:
        """Takes nothing new and waits for what runs."""
        self.draining = True
        self._on_change()
        await self._idle.wait()
