"""Real servers behind real sentinels: the master is found, and found again after it failed."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvmesh.cli.findings import Level
from kvmesh.cli.redis_check import check_redis_server
from kvmesh.core.errors import ConfigError
from kvmesh.core.types import WorkerId
from kvmesh.metadata.redis_client import RedisClient, RedisConfig
from kvmesh.metadata.redis_fleet import RedisFleetStore
from kvmesh.metadata.redis_sentinel import RedisMasters
from kvmesh.metadata.store import StoreUnavailableError
from tests.redis_sentinels import Sentinels, redis_sentinels

RECOVERED_S = 2.0
PASSWORD = "not-in-any-log"
WORKER = WorkerId("a")


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Sentinels]:
    async with redis_sentinels(tmp_path) as found:
        yield found


def store_at(url: str, password: str = "") -> RedisFleetStore:
    config = RedisConfig(url, password, key_prefix=uuid.uuid4().hex)
    return RedisFleetStore(RedisClient(config))


async def recovered_s(store: RedisFleetStore) -> float:
    """Until the store takes what it is told."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        try:
            await store.put_worker(WORKER, b"after", 60.0)
        except StoreUnavailableError:
            assert loop.time() < began + 30
            await asyncio.sleep(0.01)
        else:
            return loop.time() - began


async def test_what_was_written_is_there_after_the_master_was_killed(servers: Sentinels) -> None:
    store = store_at(servers.url)
    await store.put_group("chat", b"wish")
    await store.put_worker(WORKER, b"before", 60.0)
    await servers.has_replica()
    first = await servers.master()
    first.stop(kill=True)
    with pytest.raises(StoreUnavailableError):
        await store.list_workers()
    await servers.failed_over(first)
    assert await recovered_s(store) <= RECOVERED_S
    assert await store.list_groups() == {"chat": b"wish"}
    assert await store.list_workers() == {WORKER: b"after"}
    await store.close()


@pytest.mark.parametrize("ends", [signal.SIGSTOP, None], ids=["hangs", "is demoted"])
async def test_who_is_the_master_no_more_is_left(
    servers: Sentinels, ends: signal.Signals | None
) -> None:
    """One that wakes up again, or was told to go, takes no more writes of ours."""
    store = store_at(servers.url)
    await store.put_worker(WORKER, b"before", 60.0)
    await servers.has_replica()
    first = await servers.master()
    if ends is None:
        second = await servers.demoted(first)
    else:
        first.signal(ends)
        second = await servers.failed_over(first)
    assert await recovered_s(store) <= RECOVERED_S
    if ends is not None:
        first.signal(signal.SIGCONT)
    await servers.has_replica()
    await store.put_worker(WorkerId("b"), b"later", 60.0)
    async with second.client() as client:
        assert len(await client.keys("*")) >= 1
    assert await store.list_workers() == {WORKER: b"after", WorkerId("b"): b"later"}
    await store.close()


async def test_a_master_is_found_while_one_sentinel_lives(servers: Sentinels) -> None:
    for each in servers.sentinels[:2]:
        each.stop(kill=True)
    store = store_at(servers.url)
    await store.put_worker(WORKER, b"x", 60.0)
    servers.sentinels[2].stop(kill=True)
    assert await store.list_workers() == {WORKER: b"x"}, "who is connected needs no sentinel"
    other = store_at(servers.url)
    with pytest.raises(StoreUnavailableError, match="no sentinel knows a master kvmesh-master"):
        await asyncio.gather(*(other.list_workers() for _ in range(20)))
    await other.close()
    await store.close()


async def test_servers_ask_for_a_password_and_sentinels_do_not(tmp_path: Path) -> None:
    async with redis_sentinels(tmp_path, PASSWORD) as servers:
        bare = servers.url.replace(f":{PASSWORD}@", "")
        for url, password in ((servers.url, ""), (bare, PASSWORD)):
            store = store_at(url, password)
            await store.put_worker(WORKER, b"x", 60.0)
            assert await store.list_workers() == {WORKER: b"x"}
            await store.close()
        found = await check_redis_server(servers.url)
        assert found.level is Level.OK
        assert PASSWORD not in found.detail
        refused = store_at(bare)
        with pytest.raises(StoreUnavailableError) as told:
            await refused.list_workers()
        assert PASSWORD not in str(told.value)
        await refused.close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RedisMasters("redis+sentinel://a:1,b:2", "", 1.0), "HOST:PORT,HOST:PORT/NAME"),
        (lambda: RedisMasters("redis+sentinel://a:1/name/x", "", 1.0), "NAME"),
        (lambda: RedisMasters("redis+sentinel://a:1,b:x/name", "", 1.0), "'b:x'"),
        (lambda: RedisClient(RedisConfig("redis+sentinel:///name")), "''"),
    ],
)
def test_a_url_that_names_none_says_what_is_missing(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
