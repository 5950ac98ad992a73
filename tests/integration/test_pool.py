"""The pool live: kvmanagers over a real Redis, workers that fetch from each other."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvmesh.core.pool import CopyOrder
from kvmesh.core.types import BlockHash, Endpoint, SequenceSpec, WorkerId
from kvmesh.kv.hashing import chain_hashes
from kvmesh.metadata.redis_client import RedisConfig
from kvmesh.metadata.server_binary import RedisProcess
from kvmesh.policy.segments import home
from kvmesh.rpc.prefix_lookup import PrefixLookup
from kvmesh.runtime.admin_config import AdminConfig
from kvmesh.runtime.app import ServerConfig, ServiceContext, serving
from kvmesh.runtime.fetch_result import FetchResult
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, FetchSection, WorkerSection
from services.kvmanager import metrics
from services.kvmanager.config import KvManagerConfig, LimitConfig, PoolConfig
from services.kvmanager.service import build
from tests.redis_server import redis_process
from tests.waiting import until
from tests.worker_driver import (
    ROOT,
    Driver,
    Key,
    driving,
    make_spec,
    reference_tokens,
    running_worker,
    until_idle,
)

BLOCK_SIZE = 16
NUM_BLOCKS = 8


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    with redis_process(tmp_path) as process:
        yield process


@contextlib.asynccontextmanager
async def kvmanager(
    redis: RedisProcess, port: int = 0, placement: str = "local", eviction: str = "local"
) -> AsyncIterator[ServiceContext]:
    config = KvManagerConfig(
        server=ServerConfig(port=port, admin=AdminConfig(port=0)),
        redis=RedisConfig(url=redis.url, timeout_s=2.0),
        limits=LimitConfig(lookup_timeout_s=2.0),
        pool=PoolConfig(
            window_s=0.15,
            min_reads=2.0,
            segment_blocks=2,
            placement=placement,
            eviction=eviction,
        ),
    )
    async with serving("kvmanager", config, build) as context:
        yield context


def target_of(context: ServiceContext) -> str:
    return f"{context.host}:{context.port}"


@contextlib.asynccontextmanager
async def looking(context: ServiceContext) -> AsyncIterator[PrefixLookup]:
    lookup = PrefixLookup(target_of(context))
    task = asyncio.create_task(lookup.run())
    try:
        yield lookup
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def prompt(seed: int) -> SequenceSpec:
    rng = random.Random(seed)
    return make_spec([rng.randrange(1, 1000) for _ in range(NUM_BLOCKS * BLOCK_SIZE + 1)], 2)


def hashes_of(spec: SequenceSpec) -> list[BlockHash]:
    return chain_hashes(ROOT, spec.token_ids, BLOCK_SIZE)


async def holders(lookup: PrefixLookup, worker: Worker, spec: SequenceSpec) -> set[str]:
    """Who holds the whole prompt; a question that counts as a read."""
    namespace = worker.core.spec.layout.model_fingerprint
    answer = await lookup.match(namespace, hashes_of(spec), 5.0)
    return {match.worker_id for match in answer.matches if match.num_blocks == NUM_BLOCKS}


async def until_both_hold(lookup: PrefixLookup, worker: Worker, spec: SequenceSpec) -> None:
    async def fact() -> bool:
        return await holders(lookup, worker, spec) == {"a", "b"}

    await until(fact, "both hold the prompt")


async def read(driver: Driver, worker: Worker, label: str, spec: SequenceSpec) -> None:
    tokens = await driver.generate(worker, worker, Key(label), spec)
    assert tokens == reference_tokens(spec)


async def seen(context: ServiceContext) -> dict[str, Any]:
    url = f"http://127.0.0.1:{context.admin.port}/debug/segments"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        found = await answer.json()
        assert isinstance(found, dict)
        return found


def num_first_to_leave(worker: Worker) -> int:
    """Cached blocks that leave before all others."""
    pool = worker.core.pool
    return pool.num_room(0, pool.num_blocks) - pool.statistics().num_empty


def shows_both(view: dict[str, Any]) -> bool:
    """Whether a plan saw both workers and a prefix that both hold."""
    names = {each["worker_id"] for each in view["workers"]}
    return names == {"a", "b"} and any(each["holders"] == ["a", "b"] for each in view["segments"])


async def test_a_hot_prefix_is_copied_by_one_of_two_kvmanagers_and_read_there(
    redis: RedisProcess,
) -> None:
    spec = prompt(1)
    async with (
        kvmanager(redis) as one,
        kvmanager(redis) as two,
        running_worker(WorkerSection(id="a"), kvmanager=target_of(one)) as a,
        running_worker(WorkerSection(id="b"), kvmanager=target_of(two)) as b,
        looking(one) as lookup,
        driving(a, b) as driver,
    ):
        async with asyncio.timeout(30):
            number = 0
            while "b" not in await holders(lookup, a, spec):
                number += 1
                await read(driver, a, f"a{number}", spec)
        assert b.core.statistics().computed_tokens_total == 0
        reserved = await driver.reserve(b, Key("b"), spec)
        assert reserved.reserved.num_cached_blocks == NUM_BLOCKS
        driver.cancel_decode(b, Key("b"))
        await read(driver, b, "read", spec)
        async with asyncio.timeout(20):
            while not any([shows_both(await seen(each)) for each in (one, two)]):
                await holders(lookup, a, spec)
        # Nobody asks any more: one of the copies is what leaves first.
        await until(lambda: num_first_to_leave(a) + num_first_to_leave(b) == NUM_BLOCKS)
        await until_idle(a, b)
    for worker in (a, b):
        worker.pool.check_integrity()


@pytest.mark.parametrize("how", ["cordoned", "drained"])
async def test_what_a_leaving_worker_alone_holds_goes_elsewhere(
    redis: RedisProcess, how: str
) -> None:
    spec = prompt(4)
    async with (
        kvmanager(redis) as service,
        running_worker(
            WorkerSection(id="a"), kvmanager=target_of(service), fetch=FetchSection(leave_s=60)
        ) as a,
        running_worker(WorkerSection(id="b"), kvmanager=target_of(service)) as b,
        looking(service) as lookup,
        driving(a, b) as driver,
    ):
        await read(driver, a, "a", spec)
        if how == "cordoned":
            a._ordered_to_cordon(True, "an upgrade")
        else:
            a._ordered_to_drain("an upgrade")
        await until_both_hold(lookup, a, spec)
        assert b.core.statistics().computed_tokens_total == 0
        orders = (await seen(service))["orders"]
        assert {each["reason"] for each in orders} == {"leaving_holder"}
        await until_idle(a, b)


async def test_a_prefix_that_is_read_in_one_cluster_comes_to_the_other(
    redis: RedisProcess,
) -> None:
    spec = prompt(6)
    async with (
        kvmanager(redis) as service,
        running_worker(WorkerSection(id="a"), kvmanager=target_of(service)) as a,
        running_worker(WorkerSection(id="b", cluster="far"), kvmanager=target_of(service)) as b,
        looking(service) as lookup,
        driving(a, b) as driver,
    ):
        await read(driver, a, "a", spec)
        await until_both_hold(lookup, a, spec)
        assert b.core.statistics().computed_tokens_total == 0
        orders = (await seen(service))["orders"]
        assert {each["reason"] for each in orders} == {"other_cluster"}
        await until_idle(a, b)


async def test_a_full_worker_gives_up_what_another_one_holds(redis: RedisProcess) -> None:
    """Both hold a prompt that nobody asks for any more, and one of them needs room."""
    spec = prompt(7)
    given_up = metrics.POOL_GIVEN_UP.labels("pool")._value
    before = given_up.get()
    async with (
        kvmanager(redis, eviction="global") as service,
        running_worker(
            WorkerSection(id="a"),
            EngineSection(kind="fake", num_blocks=64),
            kvmanager=target_of(service),
        ) as a,
        running_worker(WorkerSection(id="b"), kvmanager=target_of(service)) as b,
        driving(a, b) as driver,
    ):
        await read(driver, a, "a", spec)
        await read(driver, b, "b", spec)
        pool, hashes = a.core.pool, hashes_of(spec)
        # The rest of the pool has blocks that no other worker holds, and was used before.
        blocks = pool.allocate(pool.num_empty)
        for number, block in enumerate(blocks):
            assert pool.seal(block, BlockHash(number.to_bytes(16, "big")))
        pool.release(blocks)
        with pool.held(pool.match(hashes)):
            pass
        assert pool.oldest(1) != [hashes[-1]]
        await until(lambda: pool.oldest(1) == [hashes[-1]], "the copy leaves first")
        assert given_up.get() - before >= NUM_BLOCKS
        pool.clear_cached(NUM_BLOCKS)
        assert not pool.match(hashes)
        assert len(b.core.pool.match(hashes)) == NUM_BLOCKS, "the last copy stays"
        await until_idle(a, b)


async def test_hashed_placement_puts_a_prefix_on_its_home_too(redis: RedisProcess) -> None:
    # Workers read nothing here, so their loads would order no copy.
    spec = next(each for each in map(prompt, range(20, 60)) if home(hashes_of(each)[-1], 2) == 1)
    async with (
        kvmanager(redis, placement="hashed") as service,
        running_worker(WorkerSection(id="a"), kvmanager=target_of(service)) as a,
        running_worker(WorkerSection(id="b"), kvmanager=target_of(service)) as b,
        looking(service) as lookup,
        driving(a, b) as driver,
    ):
        await read(driver, a, "a", spec)
        await until_both_hold(lookup, a, spec)
        assert b.core.statistics().computed_tokens_total == 0
        orders = (await seen(service))["orders"]
        assert {(each["target"], each["reason"]) for each in orders} == {("b", "hashed_home")}
        await read(driver, b, "b", spec)
        assert b.core.statistics().cached_tokens_total == NUM_BLOCKS * BLOCK_SIZE
        await until_idle(a, b)


async def test_a_source_that_is_gone_costs_nothing_but_the_copy(redis: RedisProcess) -> None:
    spec = prompt(2)
    failed = metrics.POOL_COPIES.labels("failed", "lost")._value
    before = failed.get()
    async with (
        kvmanager(redis) as service,
        running_worker(WorkerSection(id="b"), kvmanager=target_of(service)) as b,
    ):
        async with running_worker(WorkerSection(id="a")) as a:
            endpoint = Endpoint(a._context.host, a._context.port)
        await until(lambda: b._publisher is not None and b._publisher.connected)
        order = CopyOrder("o", WorkerId("a"), a.incarnation, endpoint, tuple(hashes_of(spec)))
        b.copies.take(order)
        await until(lambda: failed.get() == before + 1)
        await until_idle(b)
        assert b.core.pool.statistics().num_hashed == 0


async def test_a_kvmanager_that_dies_while_a_copy_is_on_its_way(redis: RedisProcess) -> None:
    spec = prompt(3)
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        service = await first.enter_async_context(kvmanager(redis))
        target, port = target_of(service), service.port
        a = await stack.enter_async_context(running_worker(WorkerSection(id="a"), kvmanager=target))
        b = await stack.enter_async_context(running_worker(WorkerSection(id="b"), kvmanager=target))
        driver = await stack.enter_async_context(driving(a, b))
        await read(driver, a, "a", spec)
        begun, may_go_on = asyncio.Event(), asyncio.Event()
        fetch = b.copies._fetch

        async def fetch_later(source: Any, hashes: Any) -> FetchResult:
            begun.set()
            await may_go_on.wait()
            return await fetch(source, hashes)

        b.copies._fetch = fetch_later
        endpoint = Endpoint(a._context.host, a._context.port)
        b.copies.take(CopyOrder("o", a.worker_id, a.incarnation, endpoint, tuple(hashes_of(spec))))
        await begun.wait()
        await first.aclose()
        may_go_on.set()
        await until(lambda: b.copies.num_waiting == 0)
        assert len(b.core.pool.match(hashes_of(spec))) == NUM_BLOCKS
        again = await stack.enter_async_context(kvmanager(redis, port))
        lookup = await stack.enter_async_context(looking(again))
        await until_both_hold(lookup, a, spec)
        await until_idle(a, b)
