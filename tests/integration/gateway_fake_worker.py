"""A worker that does what a test tells it to, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from kvmesh.core.types import (
    Endpoint,
    FinishReason,
    KvLayout,
    Refusal,
    RefusalReason,
    Reservation,
    Role,
    SequenceSpec,
    TokenLogprobs,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)
from kvmesh.rpc.channels import bind_server, make_server
from kvmesh.rpc.convert import (
    finish_reason_to_proto,
    refusal_to_proto,
    reservation_from_proto,
    reservation_to_proto,
    sequence_spec_from_proto,
)
from kvmesh.rpc.convert_sampling import token_logprobs_to_proto
from kvmesh.rpc.outbox import Outbox, parts
from kvmesh.runtime.local_start import StartedOutbox
from kvmesh.v1 import decode_service_pb2_grpc as decode_grpc
from kvmesh.v1 import prefill_service_pb2_grpc as prefill_grpc
from kvmesh.v1.decode_service_pb2 import DecodeEvent, DecodeResponse, DecodeTokens
from kvmesh.v1.prefill_service_pb2 import (
    PrefillAccepted,
    PrefillEvent,
    PrefillFirstToken,
    PrefillHandedOff,
    PrefillOffer,
    PrefillProgress,
    PrefillResponse,
)

LAYOUT = KvLayout("tiny-fingerprint", "float32", 16, 2, 2, 8)
MODEL = "tiny"

BREAK = object()


class Mesh(Protocol):
    """What a worker needs of the mesh that it is in."""

    go: asyncio.Event

    def token(self, spec: SequenceSpec, position: int) -> tuple[int, FinishReason | None]:
        """The token at a position, which depends on nothing else."""
        ...

    @property
    def workers(self) -> Mapping[str, FakeWorker]:
        """All of them, by name."""
        ...

    async def until(self, fact: Callable[[], bool]) -> None:
        """Waits until a fact holds."""
        ...


@dataclass
class Behaviour:
    """What a worker does; counts go down, -1 is for ever."""

    refuse_reserves: int = 0
    reserve_reason: RefusalReason = RefusalReason.NO_SLOTS
    reject_offers: int = 0
    takes_offers: int = -1  # so many, and rejects all after them
    offer_reason: RefusalReason = RefusalReason.BUSY
    break_offers: int = 0  # the stream breaks instead of an answer
    ignore_offers: int = 0  # no answer comes
    answers_wait: bool = False  # offers are answered in order when `awake` is set
    fail_prefills: int = 0
    lose_reservations: int = 0  # when the prefill is offered
    break_decode_after: int = 0  # tokens; then the stream breaks, once
    break_always: bool = False  # not once, but each time
    fail_decode_after: int = 0
    stall_decode_after: int = 0
    new_finish_after: int = 0  # tokens; then they end for a reason that no gateway knows, once
    repeat_tokens: bool = False  # each message repeats the token before
    tokens_per_message: int = 1
    first_waits: bool = False  # for `go`, as other tokens do
    prompt_reports: int = 0  # of progress, when the gateway wants them; -1: without an end
    transfer_reports: int = 0  # likewise, between first token and handoff
    stall_prefill: bool = False  # after those of the prompt
    decode_first: bool = False  # decode speaks before the first token
    silent_handoff: bool = False  # prefill never says that the KV is complete
    lease_ms: int = 60_000
    starts: bool = True  # reserve and offer in one; older workers only reserve


@dataclass
class Held:
    """A reservation and what it needs to run."""

    request_id: str
    attempt: int
    spec: SequenceSpec
    outbox: Outbox[Any]


def take(behaviour: Behaviour, name: str) -> bool:
    left: int = getattr(behaviour, name)
    if left > 0:
        setattr(behaviour, name, left - 1)
    return left != 0


class FakeWorker:
    """One worker with both services."""

    def __init__(self, mesh: Mesh, name: str, role: Role) -> None:
        self.mesh = mesh
        self.does = Behaviour()
        self.server = make_server()
        port = bind_server(self.server, "127.0.0.1", 0)
        endpoint = Endpoint("127.0.0.1", port)
        self.info = WorkerInfo(
            WorkerId(name), 1, role, "a", endpoint, endpoint, MODEL, LAYOUT, 512, 4, 8, 256
        )
        self.load = WorkerLoad(blocks_free=256)
        self.reserves: list[tuple[str, int]] = []
        self.offers: list[tuple[str, int]] = []
        self.started: list[tuple[str, int]] = []
        self.specs: list[SequenceSpec] = []
        self.traceparents: list[str] = []
        self.cancels: list[tuple[str, int]] = []
        self.prefetched: list[tuple[str, bytes]] = []
        self.renewed: list[str] = []
        self.held: dict[int, Held] = {}
        self.running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.prefilling: set[tuple[str, int]] = set()
        self.awake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        prefill_grpc.add_PrefillServiceServicer_to_server(_Prefill(self), self.server)
        decode_grpc.add_DecodeServiceServicer_to_server(_Decode(self), self.server)

    def spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def rejects(self) -> bool:
        """Whether the prompt that is shown now is rejected."""
        return take(self.does, "reject_offers") or not take(self.does, "takes_offers")

    async def kill(self) -> None:
        """The process dies."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.running.clear()
        self.prefilling.clear()
        self.held.clear()
        await self.server.stop(None)

    def drop(self, request_id: str, attempt: int) -> None:
        task = self.running.pop((request_id, attempt), None)
        if task is not None:
            task.cancel()
        for number, held in tuple(self.held.items()):
            if (held.request_id, held.attempt) == (request_id, attempt):
                del self.held[number]

    # --- decode ---

    def reserve(self, message: Any, outbox: Outbox[Any]) -> DecodeEvent:
        key = (message.request_id, message.attempt)
        self.reserves.append(key)
        self.traceparents.append(message.traceparent)
        event = DecodeEvent(request_id=key[0], attempt=key[1])
        if take(self.does, "refuse_reserves"):
            refusal = Refusal(self.does.reserve_reason, "told to refuse", retry_after_ms=1500)
            event.refused.CopyFrom(refusal_to_proto(refusal))
            return event
        number = len(self.reserves)
        spec = sequence_spec_from_proto(message.sequence)
        self.held[number] = Held(*key, spec, outbox)
        info = self.info
        reservation = Reservation(
            reservation_id=number,
            worker_id=info.worker_id,
            incarnation=info.incarnation,
            generation=key[1],
            capability=b"secret",
            data_endpoint=info.data_endpoint,
            num_cached_blocks=0,
            num_blocks=4,
            lease_ms=self.does.lease_ms,
        )
        event.reserved.CopyFrom(reservation_to_proto(reservation))
        return event

    def start(self, message: Any, outbox: Outbox[Any]) -> None:
        """Reserves and offers the prompt to itself, as asked in one message."""
        key = (message.request_id, message.attempt)
        self.specs.append(sequence_spec_from_proto(message.sequence))
        if self.rejects():
            refusal = Refusal(self.does.offer_reason, "told to reject", retry_after_ms=2500)
            event = DecodeEvent(request_id=key[0], attempt=key[1])
            event.prefill.rejected.CopyFrom(refusal_to_proto(refusal))
            outbox.put(DecodeResponse(events=[event]))
            return
        event = self.reserve(message, outbox)
        if event.WhichOneof("event") != "reserved":
            outbox.put(DecodeResponse(events=[event]))
            return
        offer = PrefillOffer(
            request_id=key[0],
            attempt=key[1],
            sequence=message.sequence,
            progress_ms=message.progress_ms,
        )
        offer.reservation.CopyFrom(event.reserved)
        self.started.append(key)
        started = StartedOutbox(event, _Responses(outbox))  # type: ignore[arg-type]
        self.spawn(self.prefill(offer, _Events(started)))

    def commit(self, number: int) -> None:
        held = self.held.pop(number, None)
        if held is not None:
            key = (held.request_id, held.attempt)
            self.running[key] = self.spawn(self._decode(held))

    async def _decode(self, held: Held) -> None:
        spec, does = held.spec, self.does
        position, sent = len(spec.token_ids) + 1, 0
        finish: FinishReason | None = None
        while finish is None:
            await asyncio.sleep(0)
            if does.break_decode_after and sent >= does.break_decode_after:
                does.break_decode_after *= does.break_always
                held.outbox.put(BREAK)
                return
            if does.fail_decode_after and sent >= does.fail_decode_after:
                does.fail_decode_after = 0
                event = DecodeEvent(request_id=held.request_id, attempt=held.attempt)
                lost = Refusal(RefusalReason.LOST, "told to fail", work_done=True)
                event.failed.CopyFrom(refusal_to_proto(lost))
                self.running.pop((held.request_id, held.attempt), None)
                held.outbox.put(DecodeResponse(events=[event]))
                return
            if does.stall_decode_after and sent >= does.stall_decode_after:
                does.stall_decode_after = 0
                await asyncio.Event().wait()
            await self.mesh.go.wait()
            first = position - 1 if does.repeat_tokens and sent else position
            token_ids = []
            for at in range(first, position + does.tokens_per_message):
                token_id, finish = self.mesh.token(spec, at)
                token_ids.append(token_id)
                if finish is not None and at >= position:
                    break
            tokens = DecodeTokens(
                first_position=first,
                token_ids=token_ids,
                finish_reason=finish_reason_to_proto(finish),
            )
            if does.new_finish_after and sent >= does.new_finish_after:
                does.new_finish_after = 0
                finish, tokens.finish_reason = FinishReason.ERROR, 99  # type: ignore[assignment]
            if spec.sampling.num_logprobs >= 0:
                tokens.logprobs.extend(logprobs_of(token_id) for token_id in token_ids)
            if finish is not None:
                self.running.pop((held.request_id, held.attempt), None)
            event = DecodeEvent(request_id=held.request_id, attempt=held.attempt, tokens=tokens)
            held.outbox.put(DecodeResponse(events=[event]))
            position = first + len(token_ids)
            sent += len(token_ids)

    # --- prefill ---

    def first_token(self, spec: SequenceSpec) -> tuple[PrefillFirstToken, FinishReason | None]:
        """The first token of a prompt, and why it is the last one."""
        token_id, finish = self.mesh.token(spec, len(spec.token_ids))
        first = PrefillFirstToken(
            token_id=token_id, cached_tokens=3, finish_reason=finish_reason_to_proto(finish)
        )
        if spec.sampling.num_logprobs >= 0:
            first.logprobs.CopyFrom(logprobs_of(token_id))
        if spec.sampling.num_prompt_logprobs >= 0:
            prompt = spec.token_ids[1 : spec.num_prompt_tokens]
            first.prompt_logprobs.extend(logprobs_of(token_id) for token_id in prompt)
        if spec.embedding >= 0:
            first.embedding = embedding_of(spec.token_ids, spec.embedding)
        return first, finish

    async def prefill(self, offer: Any, outbox: Any) -> None:
        key = (offer.request_id, offer.attempt)
        reservation = reservation_from_proto(offer.reservation)
        decode = self.mesh.workers[reservation.worker_id]
        spec = sequence_spec_from_proto(offer.sequence)

        def say(**event: Any) -> None:
            message = PrefillEvent(request_id=key[0], attempt=key[1], **event)
            outbox.put(PrefillResponse(events=[message]))

        if take(self.does, "lose_reservations"):
            held = decode.held.pop(reservation.reservation_id)
            event = DecodeEvent(request_id=held.request_id, attempt=held.attempt)
            event.failed.CopyFrom(refusal_to_proto(Refusal(RefusalReason.STALE, "lease over")))
            held.outbox.put(DecodeResponse(events=[event]))
            return
        self.prefilling.add(key)
        say(accepted=PrefillAccepted(cached_tokens=3))
        if take(self.does, "fail_prefills"):
            self.prefilling.discard(key)
            lost = Refusal(RefusalReason.LOST, "told to fail", work_done=True)
            say(failed=refusal_to_proto(lost))
            return
        first, finish = self.first_token(spec)

        async def report(name: str) -> None:
            while key in self.prefilling and take(self.does, name):
                await asyncio.sleep(offer.progress_ms / 1000)
                say(progress=PrefillProgress())

        await report("prompt_reports")
        if self.does.stall_prefill:
            await asyncio.Event().wait()
        if self.does.first_waits:
            await self.mesh.go.wait()
        if self.does.decode_first:
            decode.commit(reservation.reservation_id)
            await self.mesh.until(lambda: not decode.running)
        say(first_token=first)
        await report("transfer_reports")
        self.prefilling.discard(key)
        if finish is None:
            decode.commit(reservation.reservation_id)
            if not self.does.silent_handoff:
                say(handed_off=PrefillHandedOff(bytes=1, calls=1))


@dataclass
class _Responses:
    """Takes events for an outbox of responses."""

    outbox: Outbox[Any]

    def put(self, event: DecodeEvent) -> None:
        self.outbox.put(DecodeResponse(events=[event]))


@dataclass
class _Events:
    """Takes prefill's responses for an outbox of events."""

    started: StartedOutbox

    def put(self, response: PrefillResponse) -> None:
        for event in response.events:
            self.started.put(event)


def embedding_of(prompt: tuple[int, ...], dimensions: int) -> bytes:
    """What these workers say of a prompt: as many numbers as asked for, four in all."""
    values = [float(len(prompt)), *(token_id / 7 for token_id in prompt), 0.5, 0.25, 0.125]
    count = dimensions or 4
    return struct.pack(f"<{count}f", *values[:count])


def logprobs_of(token_id: int) -> Any:
    """Log-probabilities that name the token they are of."""
    return token_logprobs_to_proto(TokenLogprobs(-token_id / 8, (token_id, 5), (-0.25, -1.5)))


async def _pump(
    requests: AsyncIterator[Any], on_message: Callable[[Any], None], outbox: Outbox[Any]
) -> None:
    async for message in requests:
        for part in parts(message):
            on_message(part)
    outbox.close()


async def _serve(
    requests: AsyncIterator[Any], context: Any, on_message: Any, outbox: Outbox[Any]
) -> AsyncIterator[Any]:
    await context.send_initial_metadata(())
    reader = asyncio.get_running_loop().create_task(_pump(requests, on_message, outbox))
    try:
        async for message in outbox:
            if message is BREAK:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "told to break")
            yield message
    finally:
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader


class _Decode(decode_grpc.DecodeServiceServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker

    async def Decode(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        worker, outbox = self.worker, Outbox[Any]()
        keys: set[tuple[str, int]] = set()

        def on_message(message: Any) -> None:
            match message.WhichOneof("message"):
                case "reserve":
                    keys.add((message.reserve.request_id, message.reserve.attempt))
                    if message.reserve.start_within_ms and worker.does.starts:
                        worker.start(message.reserve, outbox)
                        return
                    outbox.put(DecodeResponse(events=[worker.reserve(message.reserve, outbox)]))
                case "renew":
                    worker.renewed.extend(message.renew.request_ids)
                case "cancel":
                    key = (message.cancel.request_id, message.cancel.attempt)
                    worker.cancels.append(key)
                    worker.prefilling.discard(key)
                    worker.drop(*key)

        try:
            async for response in _serve(requests, context, on_message, outbox):
                yield response
        finally:
            for key in keys:
                worker.drop(*key)


class _Prefill(prefill_grpc.PrefillServiceServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker

    async def Prefill(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        worker, outbox = self.worker, Outbox[Any]()

        async def later(message: Any) -> None:
            await worker.awake.wait()
            on_message(message)

        def in_order(message: Any) -> None:
            if worker.does.answers_wait and not worker.awake.is_set():
                worker.spawn(later(message))
            else:
                on_message(message)

        def on_message(message: Any) -> None:
            if message.WhichOneof("message") == "cancel":
                worker.cancels.append((message.cancel.request_id, message.cancel.attempt))
                worker.prefilling.discard((message.cancel.request_id, message.cancel.attempt))
                return
            if message.WhichOneof("message") == "prefetch":
                told = message.prefetch
                worker.prefetched.append((told.request_id, told.block_hashes))
                return
            offer = message.offer
            worker.offers.append((offer.request_id, offer.attempt))
            worker.specs.append(sequence_spec_from_proto(offer.sequence))
            worker.traceparents.append(offer.traceparent)
            if take(worker.does, "ignore_offers"):
                pass
            elif take(worker.does, "break_offers"):
                outbox.put(BREAK)
            elif worker.rejects():
                refusal = Refusal(worker.does.offer_reason, "told to reject", retry_after_ms=2500)
                event = PrefillEvent(request_id=offer.request_id, attempt=offer.attempt)
                event.rejected.CopyFrom(refusal_to_proto(refusal))
                outbox.put(PrefillResponse(events=[event]))
            else:
                worker.spawn(worker.prefill(offer, outbox))

        async for response in _serve(requests, context, in_order, outbox):
            yield response
