"""The prefill side of a worker: takes a prompt if a slot is free, else refuses; hands its KV over.

There is no queue. A request is on this worker from its acceptance until its KV is taken, and it
holds one slot all that time (P/D-Serve 3.5). Tests: tests/integration/test_worker.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc

from kvmesh.core.errors import LostError, ProtocolError, RefusedError
from kvmesh.core.types import (
    PrefixSource,
    Refusal,
    RefusalReason,
    RequestId,
    Reservation,
    SequenceSpec,
)
from kvmesh.engine.sequence import Emission, Sequence, SequenceState
from kvmesh.engine.tiered_cache import TieredCache
from kvmesh.policy.transfer_mode import TransferMode
from kvmesh.rpc.convert import refusal_to_proto, reservation_from_proto, sequence_spec_from_proto
from kvmesh.rpc.convert_route import prefix_source_from_proto
from kvmesh.rpc.served import DirectWay, serve_stream
from kvmesh.runtime import prefill_events
from kvmesh.runtime.decode_role import DecodeRole
from kvmesh.runtime.handover import Handover
from kvmesh.runtime.local_start import PrefillOutbox, StartedOutbox
from kvmesh.runtime.prefetches import Prefetches
from kvmesh.runtime.prefill_attempt import PrefillAttempt
from kvmesh.runtime.prefix_queries import PrefixQueries
from kvmesh.runtime.prefix_sources import PrefixSources
from kvmesh.runtime.progress_reports import ProgressReports
from kvmesh.runtime.prompt_chain import PromptChain
from kvmesh.runtime.worker_parts import WorkerParts
from kvmesh.runtime.worker_tiers import load_prefix
from kvmesh.telemetry.logs import event_logger
from kvmesh.telemetry.tracing import Span, start_span
from kvmesh.transfer.channel_pool import ChannelPool
from kvmesh.v1 import prefill_service_pb2 as pb
from kvmesh.v1 import prefill_service_pb2_grpc
from kvmesh.v1.decode_service_pb2 import DecodeReserve

log = event_logger(__name__)


_BUSY_RETRY_MS = 20


@dataclass(frozen=True, slots=True)
class PrefixWays:
    """Ways to get a prompt's prefix without computing it here.

    Attributes:
        sources: fetches prefixes from other workers; None computes them here.
        queries: sends queries to a worker that keeps the prefix; None switches this off.
        tiers: hold blocks that this worker's pool evicted.
        chain: computes prompts in parts on several workers; None switches this off, also for
            prompts of other workers.
    """

    sources: PrefixSources | None = None
    queries: PrefixQueries | None = None
    tiers: TieredCache | None = None
    chain: PromptChain | None = None


class PrefillRole(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Serves `PrefillService`."""

    def __init__(
        self,
        parts: WorkerParts,
        channels: ChannelPool,
        decode: DecodeRole,
        ways: PrefixWays,
        *,
        slots: int,
        mode: TransferMode | None = None,
    ) -> None:
        """Sets up the role.

        Args:
            mode: transfer mode of all requests; None lets the policy choose for each request.
        """
        self._identity = parts.identity
        self._direct: DirectWay[pb.PrefillEvent] = DirectWay(
            parts.direct, pb.PrefillRequest, lambda events: (pb.PrefillResponse(events=events),)
        )
        self._core = parts.core
        self._handover = Handover(parts, channels, mode)
        self._wake_engine = parts.wake_engine
        self._on_change, self._on_prompt = parts.on_change, parts.on_prompt
        self._metrics = parts.metrics
        self._channels = channels
        self._decode = decode
        self._sources, self._queries, self._tiers = ways.sources, ways.queries, ways.tiers
        self._chain = ways.chain
        self.prefetches = None if ways.tiers is None else Prefetches(parts.core, ways.tiers)
        """Prefetches from tiers, for requests whose route names this worker first.

        None without tiers.
        """
        decode.local_prefill = self
        self._slots = slots
        self._attempts: dict[tuple[PrefillOutbox, RequestId, int], PrefillAttempt] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    # --- the stream --------------------------------------------------------------------------

    async def Prefill(
        self,
        request_iterator: AsyncIterator[pb.PrefillRequest],
        context: grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillResponse],
    ) -> AsyncIterator[pb.PrefillResponse]:
        """Serves one gateway's stream. When the stream ends, everything on it is cancelled."""
        async for events in serve_stream(
            request_iterator, context, self._receive, self._stream_ended, self._direct
        ):
            yield pb.PrefillResponse(events=events)

    def _stream_ended(self, outbox: PrefillOutbox) -> None:
        for attempt in [a for a in self._attempts.values() if a.outbox is outbox]:
            self._cancel(attempt)
        if self.prefetches is not None:
            self.prefetches.end_of(outbox)

    def _receive(self, request: pb.PrefillRequest, outbox: PrefillOutbox) -> None:
        kind = request.WhichOneof("message")
        if kind == "offer":
            self._offer(request.offer, outbox)
        elif kind == "cancel":
            message = request.cancel
            key = (outbox, RequestId(message.request_id), message.attempt)
            if key in self._attempts:
                self._cancel(self._attempts[key])
            elif not message.attempt and self.prefetches is not None:
                self.prefetches.end(key[1])
        elif kind == "prefetch" and self.prefetches is not None and not self.draining:
            self.prefetches.begin(outbox, request.prefetch)

    def _cancel(self, attempt: PrefillAttempt) -> None:
        assert attempt.work is not None
        attempt.work.cancel()

    # --- accept or reject --------------------------------------------------------------------

    def _offer(self, message: pb.PrefillOffer, outbox: PrefillOutbox) -> None:
        span = self._span(message)
        outcome = self._try_accept(message, outbox, span)
        event = pb.PrefillEvent(request_id=message.request_id, attempt=message.attempt)
        self._answer(event, outcome, outbox, span)

    def _span(self, message: pb.PrefillOffer | DecodeReserve) -> Span:
        return start_span(
            "prefill.request",
            message.traceparent,
            request_id=message.request_id,
            worker_id=self._identity.worker_id,
        )

    def turn_away(self) -> Refusal | None:
        """Why no prompt is accepted now, counted as a rejected offer; None if a slot is free."""
        refusal = self._refusal()
        if refusal is not None:
            self._metrics.offers.labels("rejected", refusal.reason.value).inc()
        return refusal

    def start_reserved(
        self, message: DecodeReserve, reservation: Reservation, outbox: StartedOutbox
    ) -> Callable[[], None] | None:
        """Computes a prompt in the blocks just reserved for it on this worker, and answers.

        Returns:
            A function that cancels the prompt without an event; None if the prompt was rejected.
        """
        request_id = RequestId(message.request_id)
        span = self._span(message)
        source = self._source(message)
        attempt = PrefillAttempt(outbox, request_id, message.attempt, reservation, span, source)
        attempt.report_s = message.progress_ms / 1000
        outcome: PrefillAttempt | Refusal = attempt
        sequence = self._start_local(attempt)
        if isinstance(sequence, Refusal):
            outcome = sequence
        else:
            self._begin(attempt, sequence)
            self._wake_engine()
        self._answer(pb.PrefillEvent(), outcome, outbox, span)
        return None if attempt.work is None else lambda: self._cancel(attempt)

    def _answer(
        self,
        event: pb.PrefillEvent,
        outcome: PrefillAttempt | Refusal,
        outbox: PrefillOutbox,
        span: Span,
    ) -> None:
        """Puts the answer into `event`, sends it, and starts the work on an accepted prompt."""
        if isinstance(outcome, Refusal):
            span.event("rejected", reason=outcome.reason.value)
            span.end()
            self._metrics.offers.labels("rejected", outcome.reason.value).inc()
            event.rejected.CopyFrom(refusal_to_proto(outcome))
            outbox.put(event)
            return
        assert outcome.sequence is not None
        self._metrics.offers.labels("accepted", "").inc()
        event.accepted.cached_tokens = outcome.sequence.num_cached
        span.event("accepted", cached_tokens=outcome.sequence.num_cached)
        outbox.put(event)
        self._attempts[outbox, outcome.request_id, outcome.attempt] = outcome
        self._idle.clear()
        if outcome.report_s:
            outcome.reports = ProgressReports(
                outcome.report_s,
                lambda: self._progress_of(outcome),
                lambda: outbox.put(prefill_events.progress(outcome)),
            )
        outcome.work = asyncio.create_task(self._carry_out(outcome))
        # A callback: a task that is cancelled before its first step runs no `finally`.
        outcome.work.add_done_callback(lambda _: self._finish(outcome))
        self._on_prompt(outcome.request_id)

    def _refusal(self) -> Refusal | None:
        if self.draining:
            return Refusal(RefusalReason.DRAINING, "this worker is leaving")
        if len(self._attempts) >= self._slots:
            text = f"all {self._slots} prefill slots are taken"
            return Refusal(RefusalReason.BUSY, text, retry_after_ms=_BUSY_RETRY_MS)
        return None

    @property
    def _is_free(self) -> bool:
        return self._chain is not None and not (self._attempts or self._core.pending_tokens)

    def _try_accept(
        self, message: pb.PrefillOffer, outbox: PrefillOutbox, span: Span
    ) -> PrefillAttempt | Refusal:
        request_id = RequestId(message.request_id)
        refusal = self._refusal()
        if refusal is not None:
            return refusal
        if message.is_part and not self._is_free:
            # The worker that computes the rest would wait for this one, layer by layer.
            text = "this worker has other prompts than one that others wait for"
            return Refusal(RefusalReason.BUSY, text, retry_after_ms=_BUSY_RETRY_MS)
        if message.ttft_budget_ms == 0:
            return Refusal(RefusalReason.DEADLINE, "no time is left to the first token")
        if (outbox, request_id, message.attempt) in self._attempts:
            return Refusal(RefusalReason.INVALID, "this attempt is already here")
        try:
            spec = sequence_spec_from_proto(message.sequence)
        except ProtocolError as error:
            return Refusal(RefusalReason.INVALID, str(error))
        reservation = reservation_from_proto(message.reservation)
        source = self._source(message)
        attempt = PrefillAttempt(outbox, request_id, message.attempt, reservation, span, source)
        attempt.is_part = message.is_part
        attempt.report_s = message.progress_ms / 1000
        sequence = self._start(attempt, spec)
        if isinstance(sequence, Refusal):
            return sequence
        self._begin(attempt, sequence)
        if not attempt.waits:
            self._choose_way(attempt)
        self._wake_engine()
        return attempt

    def _source(self, message: pb.PrefillOffer | DecodeReserve) -> PrefixSource | None:
        """The worker to fetch a prefix from, or the worker that computes the prompt's beginning."""
        if not message.HasField("source"):
            return None
        way = self._chain if message.source.computes else self._sources
        return None if way is None else prefix_source_from_proto(message.source)

    def _choose_way(self, attempt: PrefillAttempt) -> None:
        if not self._is_local(attempt.reservation):
            self._handover.choose_way(attempt)
            self._metrics.transfer_modes.labels(attempt.mode.value).inc()

    def _is_local(self, reservation: Reservation) -> bool:
        return (
            reservation.worker_id == self._identity.worker_id
            and reservation.incarnation == self._identity.incarnation
        )

    def _start(self, attempt: PrefillAttempt, spec: SequenceSpec) -> Sequence | Refusal:
        if self._is_local(attempt.reservation):
            return self._start_local(attempt)
        sequence = self._core.admit_prefill(spec, held=True)
        if isinstance(sequence, Sequence):
            sequence.is_part = attempt.is_part
            sequence.on_emission = lambda emission: self._first_token(attempt, emission)
        return sequence

    def _start_local(self, attempt: PrefillAttempt) -> Sequence | Refusal:
        return self._decode.start_local(
            attempt.reservation, lambda emission: self._first_token(attempt, emission)
        )

    def _begin(self, attempt: PrefillAttempt, sequence: Sequence) -> None:
        """Starts a sequence, unless it waits for its prefix."""
        attempt.sequence = sequence
        sequence.on_progress = lambda: self._advanced(attempt)
        if self._asks(attempt):
            attempt.source = None
        else:
            attempt.waits = attempt.source is not None or self._may_load(sequence)
        if not attempt.waits:
            self._core.run(sequence)

    def _asks(self, attempt: PrefillAttempt) -> bool:
        """Whether part of the prefix stays with the worker that reserved blocks, for queries."""
        # The passes of a part read only this worker's blocks.
        if self._queries is None or attempt.is_part or self._is_local(attempt.reservation):
            return False
        return self._queries.consider(attempt, self._channels.link_view(attempt.reservation))

    def _may_load(self, sequence: Sequence) -> bool:
        outside = None if self._tiers is None else self._tiers.outside
        if outside is not None and outside.may_have(self._core.reusable_hashes(sequence)):
            return True
        return self._pays_to_load(sequence)

    def _pays_to_load(self, sequence: Sequence) -> bool:
        if self._tiers is None:
            return False
        num_held = sequence.num_computed // self._core.block_size
        return self._tiers.pays(self._core.reusable_hashes(sequence), num_held)

    # --- work --------------------------------------------------------------------------------

    def _advanced(self, attempt: PrefillAttempt) -> None:
        """Notes that a prompt was computed further. The engine computes older prompts first."""
        assert attempt.sequence is not None
        attempt.progress.set()
        for each in self._attempts.values():
            assert each.sequence is not None
            each.num_advances += each.sequence.sequence_id >= attempt.sequence.sequence_id

    def _progress_of(self, attempt: PrefillAttempt) -> tuple[int, int]:
        """Values that grow while a prompt is computed or its KV is sent."""
        is_sending = attempt.first is not None
        return attempt.num_advances, self._channels.sent_bytes if is_sending else 0

    def _first_token(self, attempt: PrefillAttempt, emission: Emission) -> None:
        assert attempt.sequence is not None
        attempt.first = emission
        self._advanced(attempt)
        if emission.damaged:  # the handover reports it
            return
        attempt.outbox.put(prefill_events.first_token(attempt, emission))
        attempt.span.event("first_token")

    async def _carry_out(self, attempt: PrefillAttempt) -> None:
        try:
            if attempt.waits:
                await self._bring_prefix(attempt)
            if self._is_local(attempt.reservation):
                await self._wait_first(attempt)
            else:
                await self._handover.run(attempt)
            assert attempt.first is not None, "both wait for it"
            if attempt.first.damaged:
                raise LostError(attempt.first.error)
            attempt.outcome = "handed_off"
            self._put_handed_off(attempt)
        except RefusedError as error:
            attempt.outcome = error.refusal.reason.value
            self._put_failed(attempt, error.refusal)
        except LostError as error:
            attempt.outcome = "lost"
            self._put_failed(attempt, Refusal(RefusalReason.LOST, str(error)))

    async def _bring_prefix(self, attempt: PrefillAttempt) -> None:
        """Gets the prefix: loads it from tiers, fetches it, or lets another worker compute it.

        The engine computes the blocks that are still missing.
        """
        sequence = attempt.sequence
        assert sequence is not None
        source = attempt.source
        if source is None or not source.before_load:
            is_here = source is None or source.computes
            await self._load(attempt, sequence, with_outside=is_here)
        if source is not None and source.computes:
            assert self._chain is not None, "such a source is taken by who can chain"
            # Others would wait for the whole chain.
            source = await self._chain.begin(attempt, source, is_alone=len(self._attempts) == 1)
        if source is not None and self._sources and sequence.state is not SequenceState.GONE:
            may_stay = self._is_local(attempt.reservation)
            await self._sources.bring(attempt, source, may_stay=may_stay)
            # The blocks that did not come from there.
            await self._load(attempt, sequence, with_outside=True)
        if sequence.state is SequenceState.GONE:
            raise RefusedError(Refusal(RefusalReason.STALE, "the reservation was cancelled"))
        self._choose_way(attempt)
        self._core.run(sequence)
        self._wake_engine()

    async def _load(
        self, attempt: PrefillAttempt, sequence: Sequence, *, with_outside: bool
    ) -> None:
        """Loads blocks from the tiers, if they hold any and loading is estimated to pay."""
        if self._tiers is None or self.prefetches is None:
            return
        await self.prefetches.settled(attempt.request_id)
        if with_outside and self._tiers.outside is not None:
            await self._tiers.outside.bring(self._core.reusable_hashes(sequence))
        if sequence.state is SequenceState.GONE or not self._pays_to_load(sequence):
            return
        result = await load_prefix(self._tiers, self._core.begin_fill(sequence))
        attempt.span.event(
            "prefix_load",
            loaded_tokens=result.num_loaded * self._core.block_size,
            seconds=result.seconds,
        )

    async def _wait_first(self, attempt: PrefillAttempt) -> None:
        """Waits for the first token of a prompt that is computed in its own reservation here."""
        assert attempt.sequence is not None
        while attempt.first is None:
            await attempt.progress.wait()
            attempt.progress.clear()
            if attempt.first is None and attempt.sequence.state is SequenceState.GONE:
                raise RefusedError(Refusal(RefusalReason.STALE, "the reservation was cancelled"))

    def _put_handed_off(self, attempt: PrefillAttempt) -> None:
        attempt.outbox.put(prefill_events.handed_off(attempt))
        peer = attempt.reservation.worker_id
        if attempt.sent_calls:
            self._metrics.transfer_bytes.labels(peer).observe(attempt.sent_bytes)
            self._metrics.transfer_calls.labels(peer).observe(attempt.sent_calls)

    def _put_failed(self, attempt: PrefillAttempt, refusal: Refusal) -> None:
        log.warning(
            "handoff_failed",
            request_id=attempt.request_id,
            trace_id=attempt.span.trace_id,
            peer=attempt.reservation.worker_id,
            reason=refusal.reason.value,
            message=refusal.message,
        )
        attempt.outbox.put(prefill_events.failed(attempt, refusal))

    def _finish(self, attempt: PrefillAttempt) -> None:
        assert attempt.sequence is not None
        for part in (attempt.upstream, attempt.reports):
            if part is not None:
                part.close()
        outcome = attempt.outcome
        del self._attempts[attempt.outbox, attempt.request_id, attempt.attempt]
        if not self._is_local(attempt.reservation):
            self._core.release(attempt.sequence)
            labels = ("ok", "") if outcome == "handed_off" else ("failed", outcome)
            histogram = self._metrics.transfer_seconds
            histogram.labels(attempt.reservation.worker_id, *labels).observe(attempt.sending_s)
        attempt.span.set(
            outcome=outcome,
            transfer_bytes=attempt.sent_bytes,
            transfer_calls=attempt.sent_calls,
            transfer_s=attempt.sending_s,
        )
        attempt.span.end()
        log.debug(
            "prefill_finished",
            request_id=attempt.request_id,
            trace_id=attempt.span.trace_id,
            outcome=outcome,
            transfer_bytes=attempt.sent_bytes,
        )
        if not self._attempts:
            self._idle.set()
        self._on_change()

    # --- state -------------------------------------------------------------------------------

    @property
    def num_attempts(self) -> int:
        """Prefill slots in use."""
        return len(self._attempts)

    @property
    def num_sending(self) -> int:
        """Prompts that are computed but whose KV is not taken yet."""
        return sum(attempt.first is not None for attempt in self._attempts.values())

    async def drain(self) -> None:
        """Accepts no new prompts, and waits until the KV of all accepted prompts is taken."""
        self.draining = True
        self._on_change()
        await self._idle.wait()
