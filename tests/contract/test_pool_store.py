"""One suite for both homes of PoolStore: memory and a real Redis."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis

from kvmesh.core.clock import ManualClock
from kvmesh.core.types import WorkerId
from kvmesh.metadata.pool_store import MemoryPoolStore, PoolStore, RedisPoolStore
from kvmesh.metadata.redis_client import RedisClient, RedisConfig

A, B = WorkerId("a"), WorkerId("b")


class Memory:
    """The in-memory store, with the time in hand."""

    def __init__(self) -> None:
        self._clock = ManualClock()
        self.store = MemoryPoolStore(self._clock)

    async def end_time(self, key: str) -> None:
        self._clock.advance(60.0)

    async def close(self) -> None:
        """Nothing is open."""


class Redis:
    """The Redis store under a prefix of its own; ends a TTL by moving it to the past."""

    def __init__(self, url: str) -> None:
        self._prefix = f"{{test-{uuid.uuid4().hex}}}:"
        self._client = RedisClient(RedisConfig(url=url, key_prefix=self._prefix, timeout_s=10.0))
        self._raw = redis.Redis.from_url(url, protocol=2)
        self.store = RedisPoolStore(self._client)

    async def end_time(self, key: str) -> None:
        assert 0 < await self._raw.pttl(self._prefix + key) <= 60_000
        assert await self._raw.pexpireat(self._prefix + key, 1)

    async def close(self) -> None:
        await self._raw.aclose()
        await self._client.close()


@pytest.fixture(params=["memory", "redis"])
async def home(request: pytest.FixtureRequest) -> AsyncIterator[Memory | Redis]:
    made: Memory | Redis = (
        Memory() if request.param == "memory" else Redis(request.getfixturevalue("url"))
    )
    yield made
    await made.close()


@pytest.fixture
def store(home: Memory | Redis) -> PoolStore:
    return home.store


async def test_knowledge_of_all_replicas_is_found_until_its_time_is_over(
    store: PoolStore, home: Memory | Redis
) -> None:
    assert await store.all_knowledge() == []
    await store.put_knowledge("one", b"\x00old", 60.0)
    await store.put_knowledge("one", b"\xffnew", 60.0)
    assert await store.all_knowledge() == [b"\xffnew"]
    await home.end_time("pool:knowledge:one")
    await store.put_knowledge("two", b"other", 60.0)
    assert await store.all_knowledge() == [b"other"]


async def test_an_order_is_taken_once_and_in_turn(store: PoolStore) -> None:
    await store.put_orders(A, [b"1", b"2"], 60.0)
    await store.put_orders(A, [b"3"], 60.0)
    await store.put_orders(B, [b"4"], 60.0)
    assert await store.take_orders([A, WorkerId("c")]) == {A: [b"1", b"2", b"3"]}
    assert await store.take_orders([A, B]) == {B: [b"4"]}
    assert await store.take_orders([]) == {}


async def test_orders_that_nobody_takes_end(store: PoolStore, home: Memory | Redis) -> None:
    await store.put_orders(A, [b"1"], 60.0)
    await home.end_time("pool:orders:a")
    assert await store.take_orders([A]) == {}


async def test_one_replica_plans_at_a_time(store: PoolStore, home: Memory | Redis) -> None:
    assert await store.may_plan("one", 60.0)
    assert await store.may_plan("one", 60.0)
    assert not await store.may_plan("two", 60.0)
    await store.end_plan("two")
    assert not await store.may_plan("two", 60.0)
    await store.end_plan("one")
    assert await store.may_plan("two", 60.0)
    await home.end_time("planner_lease:pool")
    assert await store.may_plan("one", 60.0)
