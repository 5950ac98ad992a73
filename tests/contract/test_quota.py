"""The Lua script decides as the policy does; and what only it can do: count over gateways."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest

from kvmesh.metadata.quota_store import RedisQuotaStore
from kvmesh.metadata.redis_client import RedisClient, RedisConfig
from kvmesh.policy.quota import (
    Quota,
    Rate,
    TenantLimits,
    TenantUsage,
    charge,
    check_usage,
)
from tests.redis_server import redis_url

BURST_S = 10.0
LEASE_S = 30.0


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[RedisClient]:
    with redis_url(tmp_path) as url:
        redis = RedisClient(RedisConfig(url, key_prefix=f"t{uuid4().hex}:", timeout_s=5.0))
        yield redis
        await redis.close()


def gateway(client: RedisClient, name: str = "g1", lease_s: float = LEASE_S) -> RedisQuotaStore:
    return RedisQuotaStore(client, name, BURST_S, lease_s)


@pytest.mark.parametrize(
    "limits",
    [TenantLimits(requests_per_min=6), TenantLimits(requests_per_min=60), TenantLimits(1, 0, 0)],
)
async def test_requests_are_counted_as_the_policy_counts_them(
    client: RedisClient, limits: TenantLimits
) -> None:
    store, usage, now = gateway(client), TenantUsage(), time.monotonic()
    rate = Rate(limits.requests_per_min, BURST_S)
    for _ in range(12):
        here = check_usage(usage, limits, BURST_S, now)
        there = await store.acquire("t", limits, 1)
        if here is None:
            assert there is None
            usage.requests_until = charge(usage.requests_until, rate, 1, now)
        else:
            assert there is not None
            assert (there.quota, there.limit) == (here.quota, here.limit)
            assert there.retry_after_s <= here.retry_after_s + 0.002
            assert there.retry_after_s >= here.retry_after_s - (time.monotonic() - now) - 0.002


async def test_tokens_may_be_overdrawn_and_are_paid_before_the_next_request(
    client: RedisClient,
) -> None:
    store, limits = gateway(client), TenantLimits(tokens_per_min=600)
    assert await store.acquire("t", limits, 1) is None
    started = time.monotonic()
    await store.settle("t", limits, 1, 700)
    usage = TenantUsage(tokens_until=charge(0.0, Rate(600, BURST_S), 700, started))
    here = check_usage(usage, limits, BURST_S, started)
    there = await store.acquire("t", limits, 1)
    assert here is not None
    assert there is not None
    assert there.quota is Quota.TOKENS
    # Less by what has passed since, which may be much where others are busy.
    passed_s = time.monotonic() - started
    assert here.retry_after_s - passed_s - 0.01 < there.retry_after_s < here.retry_after_s + 0.01
    assert await store.acquire("other", limits, 1) is None


async def test_requests_at_once_are_counted_over_gateways(client: RedisClient) -> None:
    one, two, limits = gateway(client), gateway(client, "g2"), TenantLimits(max_concurrent=3)
    assert await one.acquire("t", limits, 1) is None
    assert await one.acquire("t", limits, 2) is None
    assert await two.acquire("t", limits, 1) is None
    refusal = await two.acquire("t", limits, 2)
    assert refusal is not None
    assert refusal.quota is Quota.CONCURRENCY
    await one.settle("t", limits, 0, 0)
    assert await two.acquire("t", limits, 2) is None


async def test_what_a_dead_gateway_had_open_ends_with_its_lease(client: RedisClient) -> None:
    limits = TenantLimits(max_concurrent=1)
    dead, alive = gateway(client, "dead", lease_s=0.05), gateway(client, "alive")
    assert await dead.acquire("t", limits, 1) is None
    while await alive.acquire("t", limits, 1) is not None:  # the test's timeout is the limit
        pass


async def test_a_refused_request_costs_nothing_and_usage_is_forgotten(client: RedisClient) -> None:
    store, limits = gateway(client), TenantLimits(requests_per_min=60_000, max_concurrent=1)
    assert await store.acquire("t", limits, 1) is None
    for _ in range(50):
        assert await store.acquire("t", limits, 2) is not None
    await store.settle("t", limits, 0, 0)
    assert await client.run("return redis.call('EXISTS', ARGV[1] .. 'open:t')") == 0
    assert await client.run("return redis.call('PTTL', ARGV[1] .. 'quota:t')") in range(1, 1100)
