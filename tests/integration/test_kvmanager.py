"""The kvmanager with real gRPC and a real Redis that is killed, emptied and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.core.errors import ConfigError
from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.metadata.redis_client import RedisConfig
from kvmesh.metadata.server_binary import RedisProcess
from kvmesh.rpc.channels import open_channel
from kvmesh.rpc.prefix_lookup import PrefixLookup
from kvmesh.rpc.publisher import BlockPublisher, PublisherFacts
from kvmesh.runtime.app import ServerConfig, ServiceContext, serving
from kvmesh.v1 import kv_manager_service_pb2 as pb
from kvmesh.v1 import kv_manager_service_pb2_grpc as pb_grpc
from services.kvmanager.config import IndexConfig, KvManagerConfig, LimitConfig
from services.kvmanager.service import build
from tests.redis_server import redis_process
from tests.waiting import until

NAMESPACE = "model-a"


def block(number: int) -> BlockHash:
    return BlockHash(blake2b(str(number).encode(), digest_size=16).digest())


def blocks(numbers: Iterable[int]) -> bytes:
    return b"".join(map(block, numbers))


@dataclass
class Events:
    stored: list[BlockHash] = field(default_factory=list)
    removed: list[BlockHash] = field(default_factory=list)


class Worker:
    """Held blocks and their publisher, as a worker has them."""

    def __init__(self, target: str, name: str, incarnation: int = 1) -> None:
        self.held: dict[BlockHash, None] = {}
        self._events = Events()
        facts = PublisherFacts(WorkerId(name), incarnation, "east", NAMESPACE, 16)
        self.publisher = BlockPublisher(
            target,
            facts,
            take_events=self._take_events,
            held_hashes=lambda: list(self.held),
            interval_s=0.05,
        )

    def _take_events(self) -> Events:
        events, self._events = self._events, Events()
        return events

    def store(self, numbers: Iterable[int]) -> None:
        hashes = list(map(block, numbers))
        self.held.update(dict.fromkeys(hashes))
        self._events.stored += hashes
        self.publisher.notify()

    def remove(self, numbers: Iterable[int]) -> None:
        for block_hash in map(block, numbers):
            del self.held[block_hash]
            self._events.removed.append(block_hash)
        self.publisher.notify()


@contextlib.asynccontextmanager
async def running(*works: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(work()) for work in works]
    try:
        yield
        for task in tasks:
            assert not task.done(), f"ended early: {task}"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def config(
    redis: RedisProcess | None,
    *,
    port: int = 0,
    lease_s: float = 30.0,
    store: str = "redis",
    direct_port: int = 0,
) -> KvManagerConfig:
    return KvManagerConfig(
        server=ServerConfig(port=port, direct_port=direct_port),
        redis=RedisConfig(url=redis.url if redis else "redis://127.0.0.1:1/0", timeout_s=1.0),
        index=IndexConfig(store=store, lease_s=lease_s, sweep_interval_s=0.05),
        limits=LimitConfig(probe_interval_s=0.02, lookup_timeout_s=0.5),
    )


def target_of(context: ServiceContext) -> str:
    return f"{context.host}:{context.port}"


async def matched(lookup: PrefixLookup, numbers: Iterable[int]) -> dict[str, int] | None:
    """Blocks per worker; None when not known."""
    answer = await lookup.match(NAMESPACE, list(map(block, numbers)), 2.0)
    return {m.worker_id: m.num_blocks for m in answer.matches} if answer.known else None


async def until_matched(
    lookup: PrefixLookup, numbers: Iterable[int], expected: dict[str, int] | None
) -> None:
    asked = list(numbers)

    async def fact() -> bool:
        return await matched(lookup, asked) == expected

    await until(fact)


async def response(call: Any) -> pb.PublishResponse:
    message = await call.read()
    assert isinstance(message, pb.PublishResponse)
    return message


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    with redis_process(tmp_path) as process:
        yield process


async def test_published_blocks_are_matched(redis: RedisProcess) -> None:
    async with serving("kvmanager", config(redis), build) as context:
        lookup = PrefixLookup(target_of(context))
        a, b = Worker(target_of(context), "a"), Worker(target_of(context), "b", incarnation=9)
        async with running(lookup.run, a.publisher.run, b.publisher.run):
            a.store(range(4))
            b.store(range(2))
            await until_matched(lookup, range(6), {"a": 4, "b": 2})
            snapshots = a.publisher.num_snapshots, b.publisher.num_snapshots
            a.remove([1])
            b.store([2, 3, 4])
            await until_matched(lookup, range(6), {"a": 1, "b": 5})
            answer = await lookup.match(NAMESPACE, [block(0), block(1)], 2.0)
            assert [(m.worker_id, m.incarnation, m.cluster) for m in answer.matches] == [
                ("b", 9, "east"),
                ("a", 1, "east"),
            ]
            other = await lookup.match("model-b", [block(0)], 2.0)
            assert other.known
            assert other.matches == ()
            # Changes of a followed worker come as events.
            assert snapshots == (a.publisher.num_snapshots, b.publisher.num_snapshots)


async def test_gap_orders_a_snapshot_and_is_exact_after_it(redis: RedisProcess) -> None:
    async with (
        serving("kvmanager", config(redis), build) as context,
        open_channel(target_of(context)) as channel,
    ):
        lookup = PrefixLookup(target_of(context))
        stub: pb_grpc.KvManagerServiceAsyncStub = pb_grpc.KvManagerServiceStub(channel)
        call = stub.Publish()
        async with running(lookup.run):
            hello = pb.PublisherHello(worker_id="a", incarnation=1, namespace=NAMESPACE)
            await call.write(pb.PublishRequest(hello=hello))
            for sequence in (1, 3, 4):
                events = pb.BlockEvents(sequence=sequence, stored=blocks([sequence - 1]))
                await call.write(pb.PublishRequest(events=events))
            answers = [await response(call), await response(call)]
            assert [a.WhichOneof("message") for a in answers] == ["ack", "resync"]
            assert answers[0].ack.sequence == 1
            assert answers[1].resync.reason == "gap"
            parts = [blocks([0, 1]), blocks([2]), blocks([3])]
            for number, held in enumerate(parts):
                snapshot = pb.BlockSnapshot(
                    sequence=5, held=held, first=number == 0, last=number == 2
                )
                await call.write(pb.PublishRequest(snapshot=snapshot))
            # Nothing between the order and the snapshot's end is answered.
            answer = await response(call)
            assert answer.ack.sequence == 5
            assert await matched(lookup, range(6)) == {"a": 4}
            events = pb.BlockEvents(sequence=6, stored=blocks([4]), removed=blocks([5]))
            await call.write(pb.PublishRequest(events=events))
            assert (await response(call)).ack.sequence == 6
            assert await matched(lookup, range(6)) == {"a": 5}
        call.cancel()


async def test_redis_killed_and_restarted_empty(redis: RedisProcess) -> None:
    async with serving("kvmanager", config(redis), build) as context:
        lookup = PrefixLookup(target_of(context))
        a, b = Worker(target_of(context), "a"), Worker(target_of(context), "b")
        async with running(lookup.run, a.publisher.run, b.publisher.run):
            a.store(range(3))
            b.store(range(1))
            await until_matched(lookup, range(9), {"a": 3, "b": 1})
            redis.stop(kill=True)
            await until_matched(lookup, range(9), None)
            # The service goes on, and so do its streams; what changes now is not lost.
            a.store([3, 4])
            b.remove([0])
            b.store(range(2))
            async with open_channel(target_of(context)) as channel:
                health: Any = health_pb2_grpc.HealthStub(channel)
                status = await health.Check(health_pb2.HealthCheckRequest())
                assert status.status == health_pb2.HealthCheckResponse.SERVING
            assert await matched(lookup, range(9)) is None
            redis.start()
            await until_matched(lookup, range(9), {"a": 5, "b": 2})
            a.store([5])
            await until_matched(lookup, range(9), {"a": 6, "b": 2})


async def test_redis_down_at_start(redis: RedisProcess) -> None:
    redis.stop()
    async with serving("kvmanager", config(redis), build) as context:
        lookup = PrefixLookup(target_of(context))
        a = Worker(target_of(context), "a")
        async with running(lookup.run, a.publisher.run):
            a.store(range(3))
            await until_matched(lookup, range(3), None)
            redis.start()
            await until_matched(lookup, range(3), {"a": 3})


async def test_redis_that_hangs_degrades_without_waiting(redis: RedisProcess) -> None:
    async with serving("kvmanager", config(redis), build) as context:
        lookup = PrefixLookup(target_of(context))
        a = Worker(target_of(context), "a")
        async with running(lookup.run, a.publisher.run):
            a.store(range(3))
            await until_matched(lookup, range(3), {"a": 3})
            assert redis.pid is not None
            os.kill(redis.pid, signal.SIGSTOP)
            try:
                await until_matched(lookup, range(3), None)
                begin = time.perf_counter()
                for _ in range(20):
                    assert await matched(lookup, range(3)) is None
                # Each lookup through the breaker would take 0.5 s, all of them 10 s.
                assert time.perf_counter() - begin < 5
                a.store([3])
            finally:
                os.kill(redis.pid, signal.SIGCONT)
            await until_matched(lookup, range(4), {"a": 4})


async def test_kvmanager_restart_with_redis_needs_no_snapshot(redis: RedisProcess) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with serving("kvmanager", config(redis), build) as context:
            target, port = target_of(context), context.port
            lookup, a = PrefixLookup(target), Worker(target, "a")
            await stack.enter_async_context(running(lookup.run, a.publisher.run))
            a.store(range(3))
            await until_matched(lookup, range(9), {"a": 3})
            await until(lambda: a.publisher.is_exact)
            snapshots = a.publisher.num_snapshots
        assert not (await lookup.match(NAMESPACE, [block(0)], 2.0)).known
        async with serving("kvmanager", config(redis, port=port), build):
            await until_matched(lookup, range(9), {"a": 3})
            await until(lambda: a.publisher.connected)
            a.store([3])
            await until_matched(lookup, range(9), {"a": 4})
            assert a.publisher.num_snapshots == snapshots
            await until(lambda: a.publisher.is_exact)
        # What changes while nobody listens comes with a snapshot.
        await until(lambda: not a.publisher.connected)
        a.remove([2])
        a.store([7])
        await until(lambda: not a.publisher.is_exact)
        async with serving("kvmanager", config(redis, port=port), build):
            await until_matched(lookup, range(9), {"a": 2})
            await until_matched(lookup, [7], {"a": 1})
            assert a.publisher.num_snapshots == snapshots + 1
        await stack.aclose()


async def test_restart_without_memory_is_rebuilt_by_the_workers() -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with serving("kvmanager", config(None, store="memory"), build) as context:
            target, port = target_of(context), context.port
            lookup, a = PrefixLookup(target), Worker(target, "a")
            await stack.enter_async_context(running(lookup.run, a.publisher.run))
            a.store(range(3))
            await until_matched(lookup, range(9), {"a": 3})
            await until(lambda: a.publisher.is_exact)
            snapshots = a.publisher.num_snapshots
        async with serving("kvmanager", config(None, store="memory", port=port), build):
            await until_matched(lookup, range(9), {"a": 3})
            assert a.publisher.num_snapshots == snapshots + 1
            await stack.aclose()


async def test_silent_worker_is_not_matched_and_leaves_nothing(redis: RedisProcess) -> None:
    async with serving("kvmanager", config(redis, lease_s=0.5), build) as context:
        lookup = PrefixLookup(target_of(context))
        a, b = Worker(target_of(context), "a"), Worker(target_of(context), "b")
        async with running(lookup.run, a.publisher.run):
            async with running(b.publisher.run):
                a.store(range(2))
                b.store(range(2))
                await until_matched(lookup, range(2), {"a": 2, "b": 2})
            await until_matched(lookup, range(2), {"a": 2})
        async with running(lookup.run):
            await until_matched(lookup, range(2), {})

            async def swept() -> bool:  # but for the log, which is bounded, not emptied
                return await asyncio.to_thread(_dbsize, redis.port) == b":1\r\n"

            await until(swept)


def _dbsize(port: int) -> bytes:
    import socket

    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(b"DBSIZE\r\n")
        return connection.recv(100)


async def test_restarted_worker_matches_only_what_it_holds_now(redis: RedisProcess) -> None:
    async with serving("kvmanager", config(redis), build) as context:
        lookup = PrefixLookup(target_of(context))
        old, new = (Worker(target_of(context), "a", incarnation=i) for i in (1, 2))
        async with running(lookup.run):
            async with running(old.publisher.run):
                old.store(range(5))
                await until_matched(lookup, range(5), {"a": 5})
            async with running(new.publisher.run):
                new.store(range(2))
                await until_matched(lookup, range(5), {"a": 2})
                answer = await lookup.match(NAMESPACE, [block(0)], 2.0)
                assert [m.incarnation for m in answer.matches] == [2]


async def test_broken_messages_end_the_stream() -> None:
    broken = [
        pb.PublishRequest(heartbeat=pb.PublisherHeartbeat(sequence=0)),
        pb.PublishRequest(hello=pb.PublisherHello(worker_id="", namespace="x")),
    ]
    async with (
        serving("kvmanager", config(None, store="memory"), build) as context,
        open_channel(target_of(context)) as channel,
    ):
        stub: pb_grpc.KvManagerServiceAsyncStub = pb_grpc.KvManagerServiceStub(channel)
        for message in broken:
            publish = stub.Publish(iter([message]))
            assert await publish.code() is grpc.StatusCode.INVALID_ARGUMENT
        good = pb.PublishRequest(hello=pb.PublisherHello(worker_id="a", namespace="x"))
        events = pb.PublishRequest(events=pb.BlockEvents(sequence=1, stored=b"short"))
        for second in (good, events):
            publish = stub.Publish(iter([good, second]))
            assert await publish.code() is grpc.StatusCode.INVALID_ARGUMENT
        question = pb.MatchPrefixRequest(correlation_id=1, namespace="x", block_hashes=b"short")
        match = stub.MatchPrefix(iter([question]))
        assert await match.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_unknown_store_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"index\.store"):
        async with serving("kvmanager", config(None, store="paper"), build):
            pass


async def test_lookup_without_a_kvmanager_is_not_known_at_once() -> None:
    lookup = PrefixLookup("127.0.0.1:1")
    assert not (await lookup.match(NAMESPACE, [block(0)], 5.0)).known
    async with running(lookup.run):
        assert not (await lookup.match(NAMESPACE, [block(0)], 5.0)).known
        assert (await lookup.match(NAMESPACE, [], 5.0)).known
        assert lookup.num_waiting == 0
