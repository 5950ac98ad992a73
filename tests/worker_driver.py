"""Drives workers over their real gRPC services, one small step at a time, as a gateway would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import (
    BlockHash,
    PrefixSource,
    SamplingParams,
    SequenceSpec,
    WorkerId,
)
from kvmesh.engine.fake import FakeRunner
from kvmesh.kv.hashing import root_hash
from kvmesh.rpc.channels import open_channel
from kvmesh.rpc.convert import sequence_spec_to_proto
from kvmesh.rpc.convert_route import prefix_source_to_proto
from kvmesh.rpc.stream import PeerStream
from kvmesh.runtime.app import ServiceContext, serving
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_building import build_worker
from kvmesh.runtime.worker_config import (
    DataSection,
    EngineSection,
    EventsSection,
    FetchSection,
    OutsideSection,
    TiersSection,
    WorkerConfig,
    WorkerSection,
)
from kvmesh.runtime.worker_metrics import WorkerMetrics
from kvmesh.v1 import decode_service_pb2 as decode_pb
from kvmesh.v1 import prefill_service_pb2 as prefill_pb
from kvmesh.v1.decode_service_pb2_grpc import DecodeServiceStub
from kvmesh.v1.prefill_service_pb2_grpc import PrefillServiceStub
from kvmesh.v1.types_pb2 import Reservation as ReservationMessage
from tests.one_engine import tokens_of
from tests.waiting import until

ROOT: BlockHash = root_hash("test")


def make_spec(tokens: list[int], max_tokens: int = 8, **sampling: Any) -> SequenceSpec:
    """A greedy sequence of `tokens`."""
    params = replace(
        SamplingParams(temperature=0.0, max_tokens=max_tokens),
        **sampling,
    )
    return SequenceSpec(tuple(tokens), len(tokens), params, ROOT)


def reference_tokens(
    spec: SequenceSpec,
    num_blocks: int = 512,
    block_size: int = 16,
    groups: KvGroups | None = None,
) -> list[int]:
    """What one engine alone generates for `spec`."""
    runner = FakeRunner(num_blocks=num_blocks, block_size=block_size, groups=groups)
    return tokens_of(runner, spec)


@asynccontextmanager
async def running_worker(
    worker: WorkerSection | None = None,
    engine: EngineSection | None = None,
    events: EventsSection | None = None,
    fetch: FetchSection | None = None,
    kvmanager: str = "",
    data: DataSection | None = None,
    tiers: TiersSection | None = None,
    outside: OutsideSection | None = None,
) -> AsyncIterator[Worker]:
    """A worker in this process, on free ports, without a scheduler."""
    section = replace(worker or WorkerSection(), scheduler_targets="", kvmanager_target=kvmanager)
    config = WorkerConfig(
        worker=section,
        engine=engine or EngineSection(kind="fake"),
        events=events or EventsSection(),
        fetch=fetch or FetchSection(),
        data=data or DataSection(),
        tiers=tiers or TiersSection(),
        outside=outside or OutsideSection(),
    )
    made: list[Worker] = []

    async def build(config: WorkerConfig, context: ServiceContext) -> None:
        made.append(await build_worker(config, context, WorkerMetrics(CollectorRegistry())))

    async with serving("worker", config, build):
        yield made[0]


@dataclass(frozen=True)
class Key:
    """Which attempt of which request."""

    request_id: str
    attempt: int = 1


@asynccontextmanager
async def driving(*workers: Worker) -> AsyncIterator[Driver]:
    """A driver that is connected to these workers, and closed after."""
    driver = Driver()
    for worker in workers:
        await driver.connect(worker)
    yield driver
    await driver.close()


class Named(Protocol):
    """A worker as a driver knows it."""

    @property
    def worker_id(self) -> WorkerId:
        """Its stable name."""
        ...


class Driver:
    """One gateway's streams to some workers; events land in a queue per attempt.

    Attributes:
        handed_bytes: KV bytes that `generate` saw handed over.
    """

    def __init__(self) -> None:
        self._prefill: dict[str, PeerStream[prefill_pb.PrefillRequest, object]] = {}
        self._decode: dict[str, PeerStream[decode_pb.DecodeRequest, object]] = {}
        self._queues: dict[tuple[str, Key], asyncio.Queue[object]] = {}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._channels: list[object] = []
        self._num_fetches = 0
        self.handed_bytes: dict[Key, int] = {}

    async def connect(self, worker: Worker) -> None:
        """Opens both streams to a worker."""
        await self.connect_to(worker.worker_id, f"127.0.0.1:{worker._context.port}")

    async def connect_to(self, worker_id: WorkerId, target: str) -> None:
        """As `connect`, to a worker that may be in another process."""
        channel = open_channel(target)
        self._channels.append(channel)
        prefill: PeerStream[prefill_pb.PrefillRequest, prefill_pb.PrefillResponse] = PeerStream(
            "prefill",
            PrefillServiceStub(channel).Prefill,
            lambda m: self._take("prefill", m.events),
        )
        decode: PeerStream[decode_pb.DecodeRequest, decode_pb.DecodeResponse] = PeerStream(
            "decode", DecodeServiceStub(channel).Decode, lambda m: self._take("decode", m.events)
        )
        self._prefill[worker_id] = prefill  # type: ignore[assignment]
        self._decode[worker_id] = decode  # type: ignore[assignment]
        self._tasks[worker_id, "prefill"] = asyncio.create_task(prefill.run())
        self._tasks[worker_id, "decode"] = asyncio.create_task(decode.run())
        assert await prefill.wait_connected(5)
        assert await decode.wait_connected(5)

    async def disconnect(self, worker: Worker, side: str) -> None:
        """Cuts one stream, as a dying gateway does."""
        task = self._tasks.pop((worker.worker_id, side))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """Cuts all streams."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for channel in self._channels:
            await channel.close()  # type: ignore[attr-defined]

    def _take(self, side: str, events: object) -> None:
        for event in events:  # type: ignore[attr-defined]
            self._queue(side, Key(event.request_id, event.attempt)).put_nowait(event)

    def _queue(self, side: str, key: Key) -> asyncio.Queue[object]:
        return self._queues.setdefault((side, key), asyncio.Queue())

    async def prefill_event(self, key: Key) -> prefill_pb.PrefillEvent:
        """The next event of the prefill side."""
        event = await asyncio.wait_for(self._queue("prefill", key).get(), 10)
        assert isinstance(event, prefill_pb.PrefillEvent)
        return event

    async def decode_event(self, key: Key) -> decode_pb.DecodeEvent:
        """The next event of the decode side."""
        event = await asyncio.wait_for(self._queue("decode", key).get(), 10)
        assert isinstance(event, decode_pb.DecodeEvent)
        return event

    def has_events(self, side: str, key: Key) -> bool:
        """Whether an event waits to be read."""
        return not self._queue(side, key).empty()

    async def reserve(
        self, worker: Worker, key: Key, spec: SequenceSpec, tpot_ms: int = 0, itl_ms: int = 0
    ) -> decode_pb.DecodeEvent:
        """Sends a reserve and returns the answer."""
        message = decode_pb.DecodeReserve(
            request_id=key.request_id,
            attempt=key.attempt,
            sequence=sequence_spec_to_proto(spec),
            tpot_ms=tpot_ms,
            itl_ms=itl_ms,
        )
        self._decode[worker.worker_id].send(decode_pb.DecodeRequest(reserve=message))
        return await self.decode_event(key)

    async def start(
        self,
        worker: Named,
        key: Key,
        spec: SequenceSpec,
        source: PrefixSource | None = None,
        progress_ms: int = 0,
    ) -> decode_pb.DecodeEvent:
        """Asks for blocks and for the prompt to be computed there; returns the answer."""
        message = decode_pb.DecodeReserve(
            request_id=key.request_id,
            attempt=key.attempt,
            sequence=sequence_spec_to_proto(spec),
            start_within_ms=10_000,
            source=None if source is None else prefix_source_to_proto(source),
            progress_ms=progress_ms,
        )
        self._decode[worker.worker_id].send(decode_pb.DecodeRequest(reserve=message))
        return await self.decode_event(key)

    async def offer(
        self,
        worker: Named,
        key: Key,
        spec: SequenceSpec,
        reservation: ReservationMessage,
        progress_ms: int = 0,
    ) -> prefill_pb.PrefillEvent:
        """Sends an offer and returns the answer."""
        message = _offer(key, spec, reservation)
        message.offer.progress_ms = progress_ms
        self._prefill[worker.worker_id].send(message)
        return await self.prefill_event(key)

    async def offer_from(
        self,
        source: PrefixSource,
        worker: Worker,
        key: Key,
        spec: SequenceSpec,
        reservation: ReservationMessage,
    ) -> prefill_pb.PrefillEvent:
        """As `offer`, naming who holds a prefix."""
        message = _offer(key, spec, reservation)
        message.offer.source.CopyFrom(prefix_source_to_proto(source))
        self._prefill[worker.worker_id].send(message)
        return await self.prefill_event(key)

    def prefetch(self, worker: Worker, request_id: str, hashes: Sequence[BlockHash]) -> None:
        """Says that a prompt may be offered."""
        message = prefill_pb.PrefillPrefetch(request_id=request_id, block_hashes=b"".join(hashes))
        self._prefill[worker.worker_id].send(prefill_pb.PrefillRequest(prefetch=message))

    def end_prefetch(self, worker: Worker, request_id: str) -> None:
        """Says that it will not be."""
        cancel = prefill_pb.PrefillCancel(request_id=request_id)
        self._prefill[worker.worker_id].send(prefill_pb.PrefillRequest(cancel=cancel))

    async def offer_cancelled(
        self, worker: Worker, key: Key, spec: SequenceSpec, reservation: ReservationMessage
    ) -> prefill_pb.PrefillEvent:
        """Sends an offer and its cancel in one message and returns the answer to the offer."""
        message = _offer(key, spec, reservation)
        message.more.append(_cancel(key))
        self._prefill[worker.worker_id].send(message)
        return await self.prefill_event(key)

    def cancel_prefill(self, worker: Worker, key: Key) -> None:
        """Cancels at the prefill worker."""
        self._prefill[worker.worker_id].send(_cancel(key))

    def cancel_decode(self, worker: Worker, key: Key) -> None:
        """Cancels at the decode worker."""
        message = decode_pb.DecodeCancel(request_id=key.request_id, attempt=key.attempt)
        self._decode[worker.worker_id].send(decode_pb.DecodeRequest(cancel=message))

    def renew(self, worker: Worker, *request_ids: str) -> None:
        """Renews reservations."""
        message = decode_pb.DecodeRenew(request_ids=request_ids)
        self._decode[worker.worker_id].send(decode_pb.DecodeRequest(renew=message))

    async def generate(
        self, prefill: Worker, decode: Worker, key: Key, spec: SequenceSpec
    ) -> list[int]:
        """The whole path; the generated tokens."""
        tokens = await self.tokens_of(prefill, decode, key, spec)
        handed = await self.prefill_event(key)
        assert handed.WhichOneof("event") == "handed_off", handed
        self.handed_bytes[key] = handed.handed_off.bytes
        return tokens

    async def tokens_of(
        self, prefill: Worker, decode: Worker, key: Key, spec: SequenceSpec
    ) -> list[int]:
        """The generated tokens; the event that KV was handed off is not read."""
        reserved = await self.reserve(decode, key, spec)
        assert reserved.WhichOneof("event") == "reserved", reserved
        accepted = await self.offer(prefill, key, spec, reserved.reserved)
        assert accepted.WhichOneof("event") == "accepted", accepted
        first = await self.prefill_event(key)
        assert first.WhichOneof("event") == "first_token", first
        tokens = [first.first_token.token_id]
        finish = first.first_token.finish_reason
        if finish:
            self.cancel_decode(decode, key)
        while not finish:
            event = await self.decode_event(key)
            assert event.WhichOneof("event") == "tokens", event
            assert event.tokens.first_position == len(spec.token_ids) + len(tokens)
            tokens += event.tokens.token_ids
            finish = event.tokens.finish_reason
        return tokens

    async def generate_from(
        self, source: PrefixSource, prefill: Worker, decode: Worker, spec: SequenceSpec
    ) -> tuple[list[int], int]:
        """The whole path with a prefix of another worker; the tokens, and how many were cached."""
        self._num_fetches += 1
        key = Key(f"fetch-{self._num_fetches}")
        reserved = await self.reserve(decode, key, spec)
        accepted = await self.offer_from(source, prefill, key, spec, reserved.reserved)
        assert accepted.WhichOneof("event") == "accepted", accepted
        first = (await self.prefill_event(key)).first_token
        if first.finish_reason:
            self.cancel_decode(decode, key)
        tokens = [first.token_id]
        tokens += await self._rest(key, first.finish_reason)
        handed = await self.prefill_event(key)
        assert handed.WhichOneof("event") == "handed_off", handed
        return tokens, first.cached_tokens

    async def start_from(
        self, source: PrefixSource, worker: Worker, spec: SequenceSpec
    ) -> tuple[list[int], int]:
        """As `generate_from` on one worker, asked for in one message."""
        self._num_fetches += 1
        key = Key(f"fetch-{self._num_fetches}")
        answer = await self.start(worker, key, spec, source)
        assert answer.prefill.WhichOneof("event") == "accepted", answer
        first = (await self.decode_event(key)).prefill.first_token
        return [first.token_id, *await self._rest(key, first.finish_reason)], first.cached_tokens

    async def _rest(self, key: Key, finish: int) -> list[int]:
        tokens: list[int] = []
        while not finish:
            event = await self.decode_event(key)
            assert event.WhichOneof("event") == "tokens", event
            tokens += event.tokens.token_ids
            finish = event.tokens.finish_reason
        return tokens


def _offer(
    key: Key, spec: SequenceSpec, reservation: ReservationMessage
) -> prefill_pb.PrefillRequest:
    message = prefill_pb.PrefillOffer(
        request_id=key.request_id,
        attempt=key.attempt,
        sequence=sequence_spec_to_proto(spec),
        reservation=reservation,
        ttft_budget_ms=10_000,
    )
    return prefill_pb.PrefillRequest(offer=message)


def _cancel(key: Key) -> prefill_pb.PrefillRequest:
    message = prefill_pb.PrefillCancel(request_id=key.request_id, attempt=key.attempt)
    return prefill_pb.PrefillRequest(cancel=message)


async def until_idle(*workers: Worker) -> None:
    """Waits until nothing is held anywhere, then checks all invariants."""
    await until(lambda: all(worker.is_idle for worker in workers), "nothing is held")
    for worker in workers:
        worker.core.check_integrity()
