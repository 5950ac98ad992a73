"""BlockPublisher against a scripted kvmanager: numbering, snapshots, back pressure, reconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvmesh.core.pool import CopyOutcome, CopyResult, EvictionHint, OldBlocks, PoolOrder, PoolReport
from kvmesh.core.types import BlockHash, Endpoint, Role, WorkerId
from kvmesh.rpc import publisher as module
from kvmesh.rpc.channels import bind_server, make_server
from kvmesh.rpc.convert_pool import pool_order_to_proto
from kvmesh.rpc.publisher import BlockPublisher, PublisherFacts
from kvmesh.v1 import kv_manager_service_pb2 as pb
from kvmesh.v1 import kv_manager_service_pb2_grpc as pb_grpc
from kvmesh.v1 import pool_types_pb2
from tests.waiting import until


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


@dataclass
class Events:
    stored: list[BlockHash] = field(default_factory=list)
    removed: list[BlockHash] = field(default_factory=list)


class ScriptedKvManager(pb_grpc.KvManagerServiceServicer):
    """Acks what it is told to and records everything else."""

    def __init__(self) -> None:
        self.acking = True
        self.streams: list[list[pb.PublishRequest]] = []
        self._calls: list[Any] = []

    async def Publish(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[pb.PublishResponse]:
        await context.send_initial_metadata(())
        received: list[pb.PublishRequest] = []
        self.streams.append(received)
        self._calls.append(context)
        async for message in request_iterator:
            received.append(message)
            kind = message.WhichOneof("message")
            if self.acking and kind == "events":
                yield pb.PublishResponse(ack=pb.PublishAck(sequence=message.events.sequence))
            if self.acking and kind == "snapshot" and message.snapshot.last:
                yield pb.PublishResponse(ack=pb.PublishAck(sequence=message.snapshot.sequence))

    async def WatchPrefixes(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[pb.WatchPrefixesResponse]:
        raise AssertionError("not asked here")
        yield pb.WatchPrefixesResponse()

    async def MatchPrefix(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[pb.MatchPrefixResponse]:
        raise AssertionError("not asked here")
        yield pb.MatchPrefixResponse()

    async def tell(self, response: pb.PublishResponse) -> None:
        await self._calls[-1].write(response)

    def of_kind(self, kind: str) -> list[Any]:
        """Messages of a kind on the current stream."""
        messages = self.streams[-1] if self.streams else []
        return [getattr(m, kind) for m in messages if m.WhichOneof("message") == kind]


class Pool:
    def __init__(self) -> None:
        self.held: list[BlockHash] = []
        self.events = Events()

    def take(self) -> Events:
        events, self.events = self.events, Events()
        return events

    def store(self, *numbers: int) -> None:
        self.held += map(block, numbers)
        self.events.stored += map(block, numbers)


@contextlib.asynccontextmanager
async def listening(kvmanager: ScriptedKvManager, port: int = 0) -> AsyncIterator[int]:
    server = make_server()
    pb_grpc.add_KvManagerServiceServicer_to_server(kvmanager, server)
    bound = bind_server(server, "127.0.0.1", port)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(grace=None)


class Member:
    """The worker's end of the cluster's pool."""

    def __init__(self) -> None:
        self.room = 5
        self.taken: list[PoolOrder] = []

    def report(self) -> PoolReport:
        return PoolReport(Role.HYBRID, Endpoint("h", 1), 4096, self.room, 7)

    def take(self, order: PoolOrder) -> None:
        self.taken.append(order)


@contextlib.asynccontextmanager
async def publishing(
    pool: Pool, port: int, member: Member | None = None
) -> AsyncIterator[BlockPublisher]:
    publisher = BlockPublisher(
        f"127.0.0.1:{port}",
        PublisherFacts(WorkerId("w"), 3, "east", "model-a", 16),
        take_events=pool.take,
        held_hashes=lambda: pool.held,
        interval_s=0.02,
        pool=member,
    )
    task = asyncio.ensure_future(publisher.run())
    try:
        await until(lambda: publisher.connected)
        yield publisher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_hello_then_numbered_batches_and_heartbeats() -> None:
    kvmanager, pool = ScriptedKvManager(), Pool()
    async with listening(kvmanager) as port, publishing(pool, port) as publisher:
        for number in range(3):
            pool.store(number)
            publisher.notify()
            await until(lambda: not pool.events.stored and publisher.is_exact)
        await until(lambda: len(kvmanager.of_kind("heartbeat")) >= 2)
        assert [(e.sequence, e.stored, e.removed) for e in kvmanager.of_kind("events")] == [
            (i + 1, block(i), b"") for i in range(3)
        ]
        assert kvmanager.of_kind("heartbeat")[-1].sequence == 3
        assert kvmanager.streams[-1][0].hello == pb.PublisherHello(
            worker_id="w", incarnation=3, cluster="east", namespace="model-a", block_size=16
        )
        assert len(kvmanager.of_kind("hello")) == 1


async def test_resync_is_answered_with_a_snapshot_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_HASHES_PER_MESSAGE", 2)
    kvmanager, pool = ScriptedKvManager(), Pool()
    async with listening(kvmanager) as port, publishing(pool, port) as publisher:
        for number in range(5):
            pool.store(number)
            publisher.notify()
            await until(lambda: publisher.is_exact and not pool.events.stored)
        sequence = publisher.sequence
        await kvmanager.tell(pb.PublishResponse(resync=pb.ResyncOrder(reason="test")))
        await until(lambda: len(kvmanager.of_kind("snapshot")) == 3)
        parts = kvmanager.of_kind("snapshot")
        assert [(p.first, p.last) for p in parts] == [
            (True, False),
            (False, False),
            (False, True),
        ]
        assert b"".join(p.held for p in parts) == b"".join(map(block, range(5)))
        assert {p.sequence for p in parts} == {sequence + 1}
        await until(lambda: publisher.is_exact)
        pool.store(9)
        publisher.notify()
        await until(lambda: kvmanager.of_kind("events")[-1].sequence == sequence + 2)


async def test_empty_pool_sends_an_empty_snapshot() -> None:
    kvmanager, pool = ScriptedKvManager(), Pool()
    async with listening(kvmanager) as port, publishing(pool, port):
        await until(lambda: bool(kvmanager.of_kind("heartbeat")))
        await kvmanager.tell(pb.PublishResponse(resync=pb.ResyncOrder(reason="test")))
        await until(lambda: bool(kvmanager.of_kind("snapshot")))
        part = kvmanager.of_kind("snapshot")[0]
        assert (part.first, part.last, part.held) == (True, True, b"")


async def test_service_that_does_not_ack_gets_no_more_than_the_limit() -> None:
    kvmanager, pool = ScriptedKvManager(), Pool()
    kvmanager.acking = False
    limit = module.MAX_UNACKED_BATCHES
    async with listening(kvmanager) as port, publishing(pool, port) as publisher:
        for number in range(limit + 5):
            pool.store(number)
            publisher.notify()
            await until(lambda: not pool.events.stored)
        # Heartbeats go on, and no snapshot is pressed into a service that is behind.
        beats = len(kvmanager.of_kind("heartbeat"))
        await until(lambda: len(kvmanager.of_kind("heartbeat")) > beats)
        assert len(kvmanager.of_kind("events")) == publisher.sequence == limit
        assert not publisher.is_exact
        assert not kvmanager.of_kind("snapshot")
        kvmanager.acking = True
        await kvmanager.tell(pb.PublishResponse(ack=pb.PublishAck(sequence=limit)))
        await until(lambda: publisher.is_exact)
        (part,) = kvmanager.of_kind("snapshot")
        assert part.held == b"".join(map(block, range(limit + 5)))


async def test_batch_too_large_for_a_message_becomes_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_HASHES_PER_MESSAGE", 2)
    kvmanager, pool = ScriptedKvManager(), Pool()
    async with listening(kvmanager) as port, publishing(pool, port) as publisher:
        pool.store(0, 1, 2)
        publisher.notify()
        await until(lambda: len(kvmanager.of_kind("snapshot")) == 2)
        assert not kvmanager.of_kind("events")


async def test_lost_ack_forces_a_snapshot_after_reconnect() -> None:
    kvmanager, pool = ScriptedKvManager(), Pool()
    async with contextlib.AsyncExitStack() as stack:
        async with listening(kvmanager) as port:
            publisher = await stack.enter_async_context(publishing(pool, port))
            kvmanager.acking = False
            pool.store(0)
            publisher.notify()
            await until(lambda: bool(kvmanager.of_kind("events")))
        await until(lambda: not publisher.connected)
        kvmanager.acking = True
        async with listening(kvmanager, port):
            await until(lambda: publisher.connected and publisher.is_exact)
            assert len(kvmanager.streams) == 2
            assert [p.held for p in kvmanager.of_kind("snapshot")] == [block(0)]
            await stack.aclose()


async def test_changes_while_away_are_dropped_and_come_as_a_snapshot() -> None:
    kvmanager, pool = ScriptedKvManager(), Pool()
    async with contextlib.AsyncExitStack() as stack:
        async with listening(kvmanager) as port:
            publisher = await stack.enter_async_context(publishing(pool, port))
        await until(lambda: not publisher.connected)
        pool.store(0, 1)
        # Taken although nobody listens, so that they do not pile up.
        await until(lambda: not pool.events.stored)
        async with listening(kvmanager, port):
            await until(lambda: publisher.connected and publisher.is_exact)
            assert [p.held for p in kvmanager.of_kind("snapshot")] == [block(0) + block(1)]
            assert not kvmanager.of_kind("events")
            await stack.aclose()


async def test_quiet_reconnect_asks_with_a_heartbeat_only() -> None:
    kvmanager, pool = ScriptedKvManager(), Pool()
    async with contextlib.AsyncExitStack() as stack:
        async with listening(kvmanager) as port:
            publisher = await stack.enter_async_context(publishing(pool, port))
            pool.store(0)
            publisher.notify()
            await until(lambda: publisher.sequence == 1 and publisher.is_exact)
        await until(lambda: not publisher.connected)
        async with listening(kvmanager, port):
            await until(lambda: len(kvmanager.streams) == 2)
            await until(lambda: bool(kvmanager.of_kind("heartbeat")))
            assert kvmanager.of_kind("heartbeat")[0].sequence == 1
            assert not kvmanager.of_kind("snapshot")
            await stack.aclose()


async def test_a_member_of_the_pool_reports_changes_takes_orders_and_answers() -> None:
    kvmanager, pool, member = ScriptedKvManager(), Pool(), Member()
    hint = EvictionHint((BlockHash(block(1)),))
    async with (
        listening(kvmanager) as port,
        publishing(pool, port, member) as publisher,
    ):
        await until(lambda: len(kvmanager.of_kind("heartbeat")) >= 3)
        assert [report.room_blocks for report in kvmanager.of_kind("pool")] == [5]
        member.room = 4
        await until(lambda: len(kvmanager.of_kind("pool")) == 2)
        await kvmanager.tell(pb.PublishResponse(order=pool_types_pb2.PoolOrder()))
        cut_off = pool_types_pb2.PoolOrder(
            evict_first=pool_types_pb2.EvictionHint(block_hashes=b"x")
        )
        await kvmanager.tell(pb.PublishResponse(order=cut_off))
        await kvmanager.tell(pb.PublishResponse(order=pool_order_to_proto(hint)))
        await until(lambda: bool(member.taken))
        assert member.taken == [hint]
        publisher.answer_order(CopyResult("o", CopyOutcome.FAILED, "lost"))
        await until(lambda: bool(kvmanager.of_kind("copied")))
        assert kvmanager.of_kind("copied")[0].reason == "lost"
        publisher.answer_order((OldBlocks("host", hint.hashes),))
        await until(lambda: bool(kvmanager.of_kind("oldest")))
        (told,) = kvmanager.of_kind("oldest")[0].tiers
        assert (told.tier, told.block_hashes) == ("host", block(1))
    publisher.answer_order(CopyResult("o", CopyOutcome.DONE, "fetched"))  # nobody hears it
