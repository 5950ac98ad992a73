"""Both homes of the tenant directory: replaced in one step, or not at all."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest

from kvmesh.metadata.redis_client import RedisClient, RedisConfig
from kvmesh.metadata.store import StoreUnavailableError
from kvmesh.metadata.tenant_store import FileTenantStore, RedisTenantStore, TenantStore
from tests.redis_server import redis_process, redis_url


@pytest.fixture(params=["file", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[TenantStore]:
    if request.param == "file":
        yield FileTenantStore(tmp_path / "tenants.json")
        return
    with redis_url(tmp_path) as url:
        redis = RedisTenantStore(RedisClient(RedisConfig(url, key_prefix=f"t{uuid4().hex}:")))
        yield redis
        await redis.close()


async def test_it_is_empty_then_holds_what_was_put(store: TenantStore) -> None:
    assert await store.read() == b""
    assert await store.replace(b"", b"one")
    assert await store.read() == b"one"
    assert await store.replace(b"one", b"two")
    assert await store.read() == b"two"


async def test_a_change_of_what_changed_meanwhile_is_refused(store: TenantStore) -> None:
    assert await store.replace(b"", b"one")
    assert not await store.replace(b"", b"other")
    assert await store.read() == b"one"


async def test_one_of_many_writers_wins(store: TenantStore) -> None:
    done = await asyncio.gather(*(store.replace(b"", f"{n}".encode()) for n in range(8)))
    assert sum(done) == 1
    assert await store.read() == f"{done.index(True)}".encode()


async def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    assert await FileTenantStore(path).replace(b"", b"x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert set(os.listdir(tmp_path)) == {"tenants.json", "tenants.json.lock"}


async def test_a_place_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    missing = FileTenantStore(tmp_path / "none" / "tenants.json")
    assert await missing.read() == b""
    with pytest.raises(StoreUnavailableError, match="No such file"):
        await missing.replace(b"", b"x")
    with pytest.raises(StoreUnavailableError):
        await FileTenantStore(tmp_path).read()
    with redis_process(tmp_path) as process:
        store = RedisTenantStore(RedisClient(RedisConfig(process.url)))
        process.stop(kill=True)
        with pytest.raises(StoreUnavailableError):
            await store.read()
        await store.close()
