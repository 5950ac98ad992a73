"""The decode side of a worker: requests from their reservation to their last token.

It owns every sequence in between. `ArrivingKv` receives the KV.
Tests: tests/integration/test_worker.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc

from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import Refusal, RefusalReason, RequestId, Reservation
from kvmesh.engine.sequence import Emission, Sequence
from kvmesh.policy.token_pace import takes
from kvmesh.rpc.convert import (
    finish_reason_to_proto,
    limit_from_ms,
    refusal_to_proto,
    reservation_to_proto,
    sequence_spec_from_proto,
)
from kvmesh.rpc.convert_sampling import token_logprobs_to_proto
from kvmesh.rpc.served import DirectWay, serve_stream
from kvmesh.runtime.arriving_kv import ArrivingKv
from kvmesh.runtime.decode_pace import DecodePace
from kvmesh.runtime.decode_task import DecodeOutbox, DecodeTask
from kvmesh.runtime.local_start import LocalPrefill, StartedOutbox
from kvmesh.runtime.worker_parts import WorkerParts
from kvmesh.telemetry.logs import event_logger
from kvmesh.telemetry.tracing import Span, start_span
from kvmesh.v1 import decode_service_pb2 as pb
from kvmesh.v1 import decode_service_pb2_grpc

log = event_logger(__name__)

_EXPIRY_INTERVAL_S = 0.25


class DecodeRole(decode_service_pb2_grpc.DecodeServiceServicer):
    """Serves `DecodeService`.

    Attributes:
        arriving: receives the KV of reservations.
        pace: the speed of decoding, and the room for requests with a TPOT limit.
        local_prefill: starts a prompt together with its reservation; it sets this attribute itself.
        draining: the worker accepts no new requests.
    """

    def __init__(self, parts: WorkerParts, *, slots: int, lease_s: float) -> None:
        self._identity = parts.identity
        self._direct: DirectWay[pb.DecodeEvent] = DirectWay(
            parts.direct, pb.DecodeRequest, lambda events: (pb.DecodeResponse(events=events),)
        )
        self._core = parts.core
        self._on_change = parts.on_change
        self._on_reservation = parts.on_reservation
        self._metrics = parts.metrics
        self._slots = slots
        self._tasks: dict[tuple[DecodeOutbox, RequestId, int], DecodeTask] = {}
        self._clock = parts.clock
        self.pace = DecodePace(self._tasks.values)
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self.arriving = ArrivingKv(parts, lease_s, self._taken)
        self.local_prefill: LocalPrefill | None = None

    # --- the stream --------------------------------------------------------------------------

    async def Decode(
        self,
        request_iterator: AsyncIterator[pb.DecodeRequest],
        context: grpc.aio.ServicerContext[pb.DecodeRequest, pb.DecodeResponse],
    ) -> AsyncIterator[pb.DecodeResponse]:
        """Serves one gateway's stream. When the stream ends, everything on it is cancelled."""
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
                if task.outbox is outbox and task.request_id in names:
                    self.arriving.renew(task)
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
        # The writer is this worker itself, so the message omits how to write to the blocks.
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
        itl_s = limit_from_ms(message.itl_ms)
        # If no gap exceeds this limit, the mean does not either.
        limit_s = min(limit_from_ms(message.tpot_ms), itl_s)
        if not takes(self.pace.room(self._clock.now()), limit_s, len(spec.token_ids)):
            text = "with this request a token would take longer than it or others here accept"
            return Refusal(RefusalReason.NO_SLOTS, text, retry_after_ms=50)
        sequence = self._core.admit_decode(spec)
        if isinstance(sequence, Refusal):
            return sequence
        num_cached_blocks = sequence.num_cached // self._core.block_size
        arriving = self._core.arriving_blocks(sequence, num_cached_blocks)
        blocks = [each.block for each in arriving]
        task = DecodeTask(outbox, key[1], message.attempt, sequence, span, blocks)
        task.tpot_s, task.itl_s = limit_s, itl_s
        reservation = self.arriving.reserve(task)
        self._tasks[key] = task
        self._idle.clear()
        self._on_reservation(task.request_id)
        return reservation

    def _taken(self, task: DecodeTask) -> None:
        task.span.event("committed")
        task.decodes_since = self._clock.now()
        self._on_change()  # it no longer waits for KV, which planner loops count
        task.sequence.on_emission = lambda emission: self._emit(task, emission)

    # --- prefill on this worker --------------------------------------------------------------

    def start_local(
        self,
        reservation: Reservation,
        on_first: Callable[[Emission], None],
    ) -> Sequence | Refusal:
        """Starts computing a reserved prompt directly in its blocks (aggregated placement).

        Args:
            on_first: called with the first token; the handoff is committed by then.

        Returns:
            Its sequence, HELD.
        """
        task = self.arriving.begin_local(reservation)
        if isinstance(task, Refusal):
            return task
        task.sequence.on_emission = lambda emission: self._first_local(
            task, reservation, emission, on_first
        )
        return task.sequence

    def _first_local(
        self,
        task: DecodeTask,
        reservation: Reservation,
        emission: Emission,
        on_first: Callable[[Emission], None],
    ) -> None:
        self.arriving.end_local(task)
        if emission.finish_reason is None:
            refusal = self.arriving.commit_local(task, reservation)
            if refusal is not None:  # the lease ended while the prompt was computed
                self._fail(task, refusal)
        on_first(emission)

    # --- tokens and ends ---------------------------------------------------------------------

    def _emit(self, task: DecodeTask, emission: Emission) -> None:
        if emission.damaged:
            self._fail(task, Refusal(RefusalReason.LOST, emission.error, work_done=True))
            return
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
        self.pace.ended(task)
        generated = task.num_generated
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
            self.arriving.cancel(task)
        if not self._tasks:
            self._idle.set()
        self._on_change()

    async def watch_leases(self) -> None:
        """Ends reservations that are not renewed, forever."""
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            self.expire_leases()

    def expire_leases(self) -> None:
        """Ends reservations whose lease ran out, and notifies their gateways."""
        for task in self.arriving.expire():
            log.warning(
                "reservation_expired", request_id=task.request_id, trace_id=task.span.trace_id
            )
            self._fail(task, Refusal(RefusalReason.STALE, "the reservation's lease ended"))

    # --- state -------------------------------------------------------------------------------

    @property
    def num_reserved(self) -> int:
        """Requests that wait for their KV."""
        return self.arriving.num_open

    @property
    def num_tasks(self) -> int:
        """Requests on this worker."""
        return len(self._tasks)

    @property
    def is_idle(self) -> bool:
        """Whether no request, reservation or write is left."""
        return not self._tasks and self.arriving.is_idle

    async def drain(self) -> None:
        """Accepts no new requests and waits until the running ones end."""
        self.draining = True
        self._on_change()
        await self._idle.wait()
