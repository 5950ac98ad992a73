"""A scheduler's index behind a real kvmanager and a real Redis: restarts, losses, what is told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis.asyncio as redis_client

from kvmesh.core.clock import ManualClock, SystemClock
from kvmesh.core.types import WorkerId
from kvmesh.metadata.server_binary import RedisProcess
from kvmesh.rpc.channels import open_channel
from kvmesh.rpc.prefix_feed import STALE_S, PrefixFeed
from kvmesh.runtime.app import serving
from kvmesh.v1 import kv_manager_service_pb2 as pb
from services.kvmanager.heat import HeatBoard
from services.kvmanager.service import build
from tests.integration.test_kvmanager import (
    NAMESPACE,
    Worker,
    block,
    blocks,
    config,
    running,
    target_of,
)
from tests.redis_server import redis_process
from tests.waiting import until

START = pb.WatchPrefixesRequest(start=pb.WatchStart())


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    with redis_process(tmp_path) as process:
        yield process


def feed_of(target: str, *names: str) -> PrefixFeed:
    """A feed whose workers are members of a fleet in their first life."""
    feed = PrefixFeed(target, SystemClock())
    for name in names:
        feed.note_life(WorkerId(name), 1)
    return feed


def found(feed: PrefixFeed, numbers: Iterable[int]) -> dict[str, int] | None:
    """Blocks per worker; None when not known."""
    if not feed.known:
        return None
    found = feed.match(NAMESPACE, list(map(block, numbers)))
    return {str(name): blocks for name, blocks in found.items()}


async def until_found(feed: PrefixFeed, count: int, expected: dict[str, int]) -> None:
    await until(lambda: found(feed, range(count)) == expected)


@pytest.mark.parametrize("store", ["redis", "memory"])
async def test_the_index_follows_what_workers_publish(redis: RedisProcess, store: str) -> None:
    async with serving("kvmanager", config(redis, store=store), build) as context:
        target = target_of(context)
        early, late = feed_of(target, "a", "b"), feed_of(target, "a", "b")
        a, b = Worker(target, "a"), Worker(target, "b")
        async with running(early.run, a.publisher.run, b.publisher.run):
            await until(lambda: early.known)
            a.store(range(4_000))
            b.store(range(2))
            await until_found(early, 4_100, {"a": 4_000, "b": 2})
            async with running(late.run):
                await until_found(late, 4_100, {"a": 4_000, "b": 2})
                a.remove(reversed(range(3, 4_000)))
                for feed in (early, late):
                    await until_found(feed, 4_100, {"a": 3, "b": 2})


@pytest.mark.parametrize(("direct_port", "num_direct"), [(0, 2), (-1, 0)])
async def test_blocks_travel_beside_grpc_if_the_port_is_open(
    direct_port: int, num_direct: int
) -> None:
    settings = config(None, store="memory", direct_port=direct_port)
    async with serving("kvmanager", settings, build) as context:
        feed, a = feed_of(target_of(context), "a"), Worker(target_of(context), "a")
        async with running(feed.run, a.publisher.run):
            a.store(range(4))
            await until_found(feed, 9, {"a": 4})
            assert context.direct.num_open == num_direct


async def test_a_restarted_kvmanager_is_followed_from_where_it_was(redis: RedisProcess) -> None:
    async with serving("kvmanager", config(redis), build) as context:
        target, port = target_of(context), context.port
        feed, a = feed_of(target, "a"), Worker(target, "a")
        stack = running(feed.run, a.publisher.run)
        await stack.__aenter__()
        a.store(range(3))
        await until_found(feed, 9, {"a": 3})
        index = feed._index
    assert found(feed, range(9)) == {"a": 3}, "it counts for some time"
    async with serving("kvmanager", config(redis, port=port), build):
        await until(lambda: a.publisher.connected)
        a.store([3])
        await until_found(feed, 9, {"a": 4})
        assert feed._index is index, "no new picture was needed"
        await stack.__aexit__(None, None, None)


async def test_redis_that_was_killed_and_is_empty_is_followed_anew(redis: RedisProcess) -> None:
    async with serving("kvmanager", config(redis), build) as context:
        target = target_of(context)
        feed, a, b = feed_of(target, "a", "b"), Worker(target, "a"), Worker(target, "b")
        async with running(feed.run, a.publisher.run, b.publisher.run):
            a.store(range(3))
            b.store(range(1))
            await until_found(feed, 9, {"a": 3, "b": 1})
            redis.stop(kill=True)
            a.store([3, 4])
            b.remove([0])
            b.store(range(2))
            assert found(feed, range(9)) == {"a": 3, "b": 1}, "Redis is not on the way"
            redis.start()
            await until_found(feed, 9, {"a": 5, "b": 2})
            a.store([5])
            await until_found(feed, 9, {"a": 6, "b": 2})


async def test_lost_entries_of_the_log_lead_to_a_new_picture(redis: RedisProcess) -> None:
    async with serving("kvmanager", config(redis), build) as context:
        target = target_of(context)
        feed, a = feed_of(target, "a"), Worker(target, "a")
        async with running(feed.run, a.publisher.run):
            a.store(range(3))
            await until_found(feed, 9, {"a": 3})
            raw = redis_client.Redis.from_url(redis.url)
            (log,) = await raw.keys("*log")
            index = feed._index
            await raw.delete(log)
            await until(lambda: feed._index is not index)
            assert found(feed, range(9)) == {"a": 3}
            a.store([3])
            await until_found(feed, 9, {"a": 4})
            await raw.aclose()


async def test_a_silent_worker_ends_and_is_gone_from_the_index(redis: RedisProcess) -> None:
    async with serving("kvmanager", config(redis, lease_s=0.3), build) as context:
        target = target_of(context)
        feed, a, b = feed_of(target, "a", "b"), Worker(target, "a"), Worker(target, "b")
        async with running(feed.run, b.publisher.run):
            async with running(a.publisher.run):
                a.store(range(3))
                b.store(range(2))
                await until_found(feed, 9, {"a": 3, "b": 2})
            await until_found(feed, 9, {"b": 2})
            await until(lambda: feed.num_blocks == 2, "swept")


async def test_reads_are_told_for_the_counts_of_the_pool(
    redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, bytes, int]] = []
    monkeypatch.setattr(HeatBoard, "note", lambda _, *read: told.append(read))
    async with serving("kvmanager", config(redis), build) as context:
        target = target_of(context)
        feed, a = feed_of(target, "a"), Worker(target, "a")
        async with running(feed.run, a.publisher.run):
            a.store(range(20))
            await until(lambda: feed.num_blocks == 20)
            assert found(feed, [*range(20), 77]) == {"a": 20}
            assert found(feed, [77]) == {}
            await until(lambda: told == [(NAMESPACE, blocks(range(20)), 20)])


def _reads(hashes: bytes) -> pb.WatchPrefixesRequest:
    read = pb.PrefixRead(namespace=NAMESPACE, block_hashes=hashes)
    return pb.WatchPrefixesRequest(reads=pb.PrefixReads(reads=[read]))


@pytest.mark.parametrize(
    "later",
    [
        b"\xff\xff no message",
        _reads(b"half a hash").SerializeToString(),
        START.SerializeToString(),
    ],
    ids=["damaged", "half a hash", "a second start"],
)
async def test_a_watcher_that_breaks_the_contract_later_is_told(later: bytes) -> None:
    async with serving("kvmanager", config(None, store="memory"), build) as context:
        target = target_of(context)
        async with open_channel(target) as channel:
            call: Any = channel.stream_stream("/kvmesh.v1.KvManagerService/WatchPrefixes")()
            await call.write(START.SerializeToString())
            await call.read()
            await call.write(_reads(bytes(16)).SerializeToString())
            await call.write(later)
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:  # the status follows all messages
                    pass
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_redis_that_hangs_does_not_stop_lookups_until_they_are_too_old(
    redis: RedisProcess,
) -> None:
    clock = ManualClock()
    async with serving("kvmanager", config(redis), build) as context:
        feed = PrefixFeed(target_of(context), clock)
        feed.note_life(WorkerId("a"), 1)
        a = Worker(target_of(context), "a")
        async with running(feed.run, a.publisher.run):
            a.store(range(3))
            await until_found(feed, 3, {"a": 3})
            assert redis.pid is not None
            os.kill(redis.pid, signal.SIGSTOP)
            try:
                await until(lambda: feed._cut_at == clock.now())
                assert found(feed, range(3)) == {"a": 3}
                clock.advance(STALE_S)
                assert found(feed, range(3)) is None
            finally:
                os.kill(redis.pid, signal.SIGCONT)
            await until_found(feed, 3, {"a": 3})


async def test_nobody_is_known_before_the_first_picture() -> None:
    feed = feed_of("127.0.0.1:1", "a")
    async with running(feed.run):
        await asyncio.sleep(0)
        assert not feed.known
