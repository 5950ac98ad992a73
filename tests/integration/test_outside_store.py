"""A Redis below the tiers: what one worker stored there another one finds, with the same tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from kvmesh.core.types import BlockHash
from kvmesh.engine import outside_cache
from kvmesh.engine.outside_cache import OutsideCache
from kvmesh.kv.hashing import chain_hashes, root_hash
from kvmesh.kv.tiers import TierStatistics
from kvmesh.metadata.redis_blocks import RedisBlocks
from kvmesh.metadata.server_binary import RedisProcess
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import (
    EngineSection,
    OutsideSection,
    TiersSection,
    WorkerSection,
)
from tests.integration.families import NEW_TOKENS, Checkpoint
from tests.redis_server import redis_process
from tests.waiting import until
from tests.worker_driver import (
    Driver,
    Key,
    driving,
    make_spec,
    reference_tokens,
    running_worker,
    until_idle,
)

ENGINE = EngineSection(kind="fake", max_batch_tokens=64, num_blocks=48, fake_step_s=0.01)
DRAW = random.Random(11)
SPECS = [make_spec([DRAW.randrange(1, 1000) for _ in range(500)]) for _ in range(4)]
FULL = 31
"""Blocks of a prompt that may come from a cache."""

BLOCK_BYTES, SUM_BYTES = 128, 4


@pytest.fixture
def server() -> Iterator[RedisProcess]:
    with redis_process() as process:
        yield process


@asynccontextmanager
async def sharing(
    server: RedisProcess,
    folder: Path,
    name: str,
    engine: EngineSection = ENGINE,
    host_gib: float = 0.01,
) -> AsyncIterator[tuple[Worker, Driver]]:
    """A worker with tiers of its own, which are empty, and the store below them."""
    tiers = TiersSection(host_gib=host_gib, disk_gib=0.001, disk_path=str(folder / name))
    outside = OutsideSection(server.url, key_prefix="other:", ttl_s=1000.0)
    section = WorkerSection(id=name)
    async with (
        running_worker(section, engine, tiers=tiers, outside=outside) as worker,
        driving(worker) as driver,
    ):
        yield worker, driver
        await until_idle(worker)
        assert worker.tiers is not None
        worker.tiers.check_integrity()
        worker.core.check_integrity()


def outside_of(worker: Worker) -> OutsideCache:
    assert worker.tiers is not None
    assert worker.tiers.outside is not None
    return worker.tiers.outside


def counts(worker: Worker) -> TierStatistics:
    return outside_of(worker).statistics()


async def store_all(worker: Worker, driver: Driver) -> None:
    """Prompts that do not fit the pool, until the first of them is in the store."""
    for number, spec in enumerate(SPECS):
        await driver.generate(worker, worker, Key(f"fill-{number}"), spec)
        await until_idle(worker)
    names = chain_hashes(SPECS[0].root_hash, SPECS[0].token_ids, 16)[:FULL]
    store = outside_of(worker)._store

    async def is_there() -> bool:
        return all(await store.has(names))

    await until(is_there, "the first prompt is in the store")
    await until_idle(worker)


async def all_stored(worker: Worker) -> None:
    """Waits until nothing waits for the store."""
    await until(lambda: not outside_of(worker)._waiting, "all was offered")
    await until_idle(worker)


async def computed_for(worker: Worker, driver: Driver, name: str) -> int:
    """Asks for the first prompt; returns how many tokens were computed."""
    before = worker.core.token_totals[0]
    tokens = await driver.generate(worker, worker, Key(name), SPECS[0])
    assert tokens == reference_tokens(SPECS[0])
    await until_idle(worker)
    return worker.core.token_totals[0] - before


async def test_another_worker_finds_the_prefix(server: RedisProcess, tmp_path: Path) -> None:
    async with sharing(server, tmp_path, "a") as (first, driver):
        await store_all(first, driver)
        stored = counts(first).stored_total
    with redis.Redis.from_url(server.url) as client:
        keys = list(client.scan_iter(match="*", count=1000))
        assert len(keys) == stored >= FULL
        assert all(key.startswith(b"{other:}kv:") for key in keys)
        assert client.strlen(keys[0]) == BLOCK_BYTES + SUM_BYTES
        assert 0 < client.ttl(keys[0]) <= 1000
    async with sharing(server, tmp_path, "b") as (second, driver):
        assert await computed_for(second, driver, "again") < 20
        assert counts(second).loaded_total == FULL
        assert counts(second).stored_total == 0
        # It is told what it has, from its tiers and its pool alike.
        names = chain_hashes(SPECS[0].root_hash, SPECS[0].token_ids, 16)[:FULL]
        assert set(names) <= set(second.core.pool.held_hashes())
        assert set(second.core.pool.take_events().stored) == set(second.core.pool.told_names())


async def test_as_much_comes_as_host_memory_holds(server: RedisProcess, tmp_path: Path) -> None:
    async with sharing(server, tmp_path, "a") as (first, driver):
        await store_all(first, driver)
    places = 20 * BLOCK_BYTES / (1 << 30)
    async with sharing(server, tmp_path, "b", host_gib=places) as (second, driver):
        assert 170 < await computed_for(second, driver, "again") < 200
        assert counts(second).loaded_total == 20
        for number, spec in enumerate(SPECS):
            await driver.generate(second, second, Key(f"more-{number}"), spec)
            await until_idle(second)
            assert len(outside_of(second)._waiting) <= 20


async def test_a_prefix_comes_as_soon_as_it_is_routed(server: RedisProcess, tmp_path: Path) -> None:
    async with sharing(server, tmp_path, "a") as (first, driver):
        await store_all(first, driver)
    names = chain_hashes(SPECS[0].root_hash, SPECS[0].token_ids, 16)[:FULL]
    roomy = replace(ENGINE, num_blocks=80)
    async with sharing(server, tmp_path, "b", roomy) as (second, driver):
        driver.prefetch(second, "again", names)
        await until(lambda: len(second.core.pool.match(names)) == FULL, "the prefix is up")
        await until_idle(second)
        assert await computed_for(second, driver, "again") < 20
        assert counts(second).loaded_total == FULL


async def test_what_others_stored_is_not_stored_again(server: RedisProcess, tmp_path: Path) -> None:
    for name in ("a", "b"):
        async with sharing(server, tmp_path, name) as (worker, driver):
            await store_all(worker, driver)
            await all_stored(worker)
            stored = counts(worker).stored_total
            assert (stored > FULL) == (name == "a")


async def test_tenants_and_checkpoints_share_nothing(server: RedisProcess, tmp_path: Path) -> None:
    async with sharing(server, tmp_path, "a") as (first, driver):
        await store_all(first, driver)
    async with sharing(server, tmp_path, "b") as (second, driver):
        root = root_hash("test", cache_salt="another tenant")
        await driver.generate(second, second, Key("salted"), replace(SPECS[0], root_hash=root))
        await until_idle(second)
        assert counts(second).loaded_total == 0
        assert second.core.token_totals[0] > 500
    other = replace(ENGINE, fake_token_bytes=16)
    async with sharing(server, tmp_path, "c", other) as (third, driver):
        assert await computed_for(third, driver, "again") > 490
        assert counts(third).loaded_total == 0


@pytest.mark.parametrize("length", [BLOCK_BYTES + SUM_BYTES, 10, 1 << 20])
async def test_damaged_values_cost_computation_and_nothing_else(
    server: RedisProcess, tmp_path: Path, length: int
) -> None:
    async with sharing(server, tmp_path, "a") as (first, driver):
        await store_all(first, driver)
    with redis.Redis.from_url(server.url) as client:
        keys = list(client.scan_iter(match="*", count=1000))
        damaged = {key: DRAW.randbytes(length) for key in keys}
        client.mset(damaged)
        async with sharing(server, tmp_path, "b") as (second, driver):
            assert await computed_for(second, driver, "again") > 490
            assert counts(second).lost_total == FULL
            assert counts(second).loaded_total == 0
        # Deleted, and perhaps stored anew.
        names = chain_hashes(SPECS[0].root_hash, SPECS[0].token_ids, 16)[:FULL]
        read = {name.hex().encode() for name in names}
        for key, value in damaged.items():
            assert (client.get(key) == value) == (key.rpartition(b":")[2] not in read)


async def test_a_store_that_dies_costs_computation_and_comes_back(
    server: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside_cache, "PAUSE_S", 0.05)
    async with sharing(server, tmp_path, "a") as (first, driver):
        await store_all(first, driver)
        server.stop(kill=True)
        async with sharing(server, tmp_path, "b") as (second, other):
            assert await computed_for(second, other, "without") > 490
            assert counts(second).loaded_total == 0
            server.start()  # empty
            before = counts(second).stored_total
            for number, spec in enumerate(SPECS):
                await other.generate(second, second, Key(f"more-{number}"), spec)
                await until_idle(second)
            await until(lambda: counts(second).stored_total > before, "it is used again")


async def test_a_cancel_while_it_comes_frees_everything(
    server: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sharing(server, tmp_path, "a") as (first, driver):
        await store_all(first, driver)
    get, asked = RedisBlocks.get, asyncio.Event()

    async def slowly(
        self: RedisBlocks, keys: Sequence[BlockHash], into: Sequence[memoryview]
    ) -> list[bool]:
        asked.set()
        await asyncio.Event().wait()
        return await get(self, keys, into)

    async with sharing(server, tmp_path, "b") as (second, driver):
        monkeypatch.setattr(RedisBlocks, "get", slowly)
        await driver.start(second, Key("cancelled"), SPECS[0])
        await asked.wait()
        driver.cancel_decode(second, Key("cancelled"))
        await until_idle(second)
        monkeypatch.setattr(RedisBlocks, "get", get)
        assert await computed_for(second, driver, "again") < 20


@pytest.mark.parametrize("family", ["gemma3", "qwen3-next"])
async def test_checkpoints_go_on_behind_what_another_worker_stored(
    server: RedisProcess, tmp_path: Path, family: str
) -> None:
    checkpoint = Checkpoint(family, tmp_path / "model")
    engine = EngineSection(
        model=str(checkpoint.folder), num_blocks=64, max_batch_tokens=48, state_interval_tokens=64
    )
    prompt = checkpoint.prompts[4]
    prompts = [[(token + shift) % 320 for token in prompt] for shift in range(5)]
    computed = []
    for name in ("a", "b"):
        async with sharing(server, tmp_path, name, engine) as (worker, driver):
            for number, tokens in enumerate(prompts):
                spec = make_spec(tokens, max_tokens=NEW_TOKENS)
                got = await driver.generate(worker, worker, Key(f"{name}-{number}"), spec)
                assert got == checkpoint.continue_greedily(tokens)
                await until_idle(worker)
            await all_stored(worker)
            computed.append(worker.core.token_totals[0])
    assert computed[1] < computed[0] / 2
