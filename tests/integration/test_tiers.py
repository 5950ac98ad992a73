"""Prompts whose prefix a worker has evicted: it comes back from host memory, same tokens."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import prometheus_client
import pytest

from kvmesh.core.block_names import in_host
from kvmesh.core.types import PrefixSource
from kvmesh.kv.hashing import chain_hashes
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import (
    EngineSection,
    FetchSection,
    TiersSection,
    WorkerSection,
)
from tests.integration.families import NEW_TOKENS, Checkpoint
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
TIERS = TiersSection(host_gib=0.01)
DRAW = random.Random(7)
SPECS = [make_spec([DRAW.randrange(1, 1000) for _ in range(500)]) for _ in range(5)]


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with running_worker(WorkerSection(id="w"), ENGINE, tiers=TIERS) as worker:
        yield worker


@pytest.fixture
async def driver(worker: Worker) -> AsyncIterator[Driver]:
    async with driving(worker) as driver:
        yield driver
        await until_idle(worker)


async def fill(driver: Driver, worker: Worker) -> None:
    """More prompts than fit; nothing of the first one is left in the pool."""
    for number, spec in enumerate(SPECS):
        await driver.generate(worker, worker, Key(f"fill-{number}"), spec)
        await until_idle(worker)
    assert worker.core.pool.statistics().evicted_total > 100


async def test_an_evicted_prefix_is_not_computed_again(worker: Worker, driver: Driver) -> None:
    await fill(driver, worker)
    for way in ("in one message", "reserved and offered"):
        for number, spec in enumerate(SPECS):
            before = worker.core.token_totals[0]
            if way == "in one message":
                key = Key(f"again-{number}")
                answer = await driver.start(worker, key, spec)
                assert answer.prefill.WhichOneof("event") == "accepted", answer
                first = (await driver.decode_event(key)).prefill.first_token
                tokens = [first.token_id, *await driver._rest(key, first.finish_reason)]
                assert first.cached_tokens == 496
            else:
                tokens = await driver.generate(worker, worker, Key(f"twice-{number}"), spec)
            assert tokens == reference_tokens(spec)
            await until_idle(worker)
            assert worker.core.token_totals[0] - before < 20
    assert worker.tiers is not None
    worker.tiers.check_integrity()
    assert worker.tiers.statistics()[0].loaded_total > 200


async def test_others_are_told_of_what_lies_below(worker: Worker, driver: Driver) -> None:
    await fill(driver, worker)
    pool = worker.core.pool
    events = pool.take_events()
    assert not events.removed
    held = pool.held_hashes()
    assert set(events.stored) == set(pool.told_names()) > set(held)
    assert len(held) > pool.num_blocks
    below = [each for each in held if pool.find(each) is None]
    assert below
    assert set(map(in_host, below)) <= set(events.stored)
    text = prometheus_client.generate_latest(worker._metrics.registry).decode()
    (line,) = [line for line in text.splitlines() if line.startswith("kvmesh_tier_blocks{")]
    assert line.startswith('kvmesh_tier_blocks{tier="host"}')
    assert float(line.split()[-1]) > 100


async def test_another_worker_reads_what_lies_below(worker: Worker, driver: Driver) -> None:
    await fill(driver, worker)
    info = worker._info
    source = PrefixSource(info.worker_id, info.incarnation, info.control_endpoint, 31)
    async with (
        running_worker(WorkerSection(id="reader"), ENGINE) as reader,
        driving(reader) as other,
    ):
        spec = SPECS[0]
        hashes = chain_hashes(spec.root_hash, spec.token_ids, 16)
        assert not worker.core.pool.match(hashes)
        # Two thirds of the pool, of which half may be leased, in two pieces.
        tokens, cached = await other.generate_from(source, reader, reader, spec)
        assert tokens == reference_tokens(spec)
        assert cached == 496
        assert reader.core.token_totals[0] < 20
        assert worker.pool.statistics().opened_total == 2
        await until_idle(worker, reader)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("family", ["gemma3", "deepseek-v3", "qwen3-next"])
async def test_another_worker_reads_all_kinds_of_blocks_from_below(
    family: str, tier: str, tmp_path: Path
) -> None:
    """Windows, latents and states: the reader goes on behind what the holder had evicted."""
    checkpoint = Checkpoint(family, tmp_path / "model", (250,))
    (prompt,) = checkpoint.prompts
    engine = EngineSection(
        model=str(checkpoint.folder), num_blocks=64, max_batch_tokens=48, state_interval_tokens=64
    )
    tiers = TiersSection(disk_gib=0.1, disk_path=str(tmp_path / "disk"))
    tiers = TiersSection(host_gib=0.1) if tier == "host" else tiers
    wide = FetchSection(max_share=1.0)
    async with (
        running_worker(WorkerSection(id="w"), engine, tiers=tiers, fetch=wide) as worker,
        running_worker(WorkerSection(id="reader"), engine) as reader,
        driving(worker, reader) as driver,
    ):
        for shift in range(5):
            tokens = [(token + shift) % 320 for token in prompt]
            spec = make_spec(tokens, max_tokens=NEW_TOKENS)
            await driver.generate(worker, worker, Key(f"fill-{shift}"), spec)
            await until_idle(worker)
        spec = make_spec(prompt, max_tokens=NEW_TOKENS)
        hashes = chain_hashes(spec.root_hash, spec.token_ids, 16)
        assert not worker.core.pool.match(hashes)
        info = worker._info
        source = PrefixSource(info.worker_id, info.incarnation, info.control_endpoint, 15)
        tokens, cached = await driver.generate_from(source, reader, reader, spec)
        assert tokens == checkpoint.expected[0]
        assert cached == 240
        assert reader.core.token_totals[0] < 16 + NEW_TOKENS
        await until_idle(worker, reader)
        assert worker.tiers is not None
        assert worker.tiers.statistics()[0].loaded_total >= 15
        worker.tiers.check_integrity()


@pytest.mark.parametrize("num_free", [8, 1])
async def test_a_busy_worker_lends_what_lies_below_in_pieces(
    worker: Worker, driver: Driver, num_free: int
) -> None:
    """Its requests hold the pool, so that the whole prefix never fits beside them."""
    await fill(driver, worker)
    info, pool = worker._info, worker.core.pool
    source = PrefixSource(info.worker_id, info.incarnation, info.control_endpoint, 31)
    async with (
        running_worker(WorkerSection(id="reader"), ENGINE) as reader,
        driving(reader) as other,
    ):
        taken = pool.allocate(pool.num_free - num_free)
        tokens, cached = await other.generate_from(source, reader, reader, SPECS[0])
        assert tokens == reference_tokens(SPECS[0])
        assert cached == 496
        assert worker.pool.statistics().opened_total >= 31 // max(num_free, 1)
        await until(lambda: worker.pool.is_idle)
        pool.release(taken)
        await until_idle(worker, reader)
        pool.check_integrity()


async def test_a_cancel_while_it_comes_up_frees_everything(worker: Worker, driver: Driver) -> None:
    await fill(driver, worker)
    assert worker.tiers is not None
    loaded = worker.tiers.statistics()[0].loaded_total
    for number in range(8):
        spec, key = SPECS[number % 5], Key(f"cancelled-{number}")
        await driver.start(worker, key, spec)
        driver.cancel_decode(worker, key)
        await until_idle(worker)
    await until(lambda: worker.is_idle)
    assert worker.tiers.statistics()[0].loaded_total > loaded
    worker.tiers.check_integrity()
    tokens = await driver.generate(worker, worker, Key("last"), SPECS[0])
    assert tokens == reference_tokens(SPECS[0])


@pytest.mark.parametrize("family", ["qwen3-untied", "gemma3", "deepseek-v3", "qwen3-next"])
async def test_checkpoints_go_on_behind_what_came_back(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(family, tmp_path / "model")
    engine = EngineSection(
        model=str(checkpoint.folder), num_blocks=64, max_batch_tokens=48, state_interval_tokens=64
    )
    prompt = checkpoint.prompts[4]
    prompts = [[(token + shift) % 320 for token in prompt] for shift in range(5)]
    async with (
        running_worker(WorkerSection(id="w"), engine, tiers=TiersSection(host_gib=0.1)) as worker,
        driving(worker) as driver,
    ):
        for turn in range(2):
            before = worker.core.token_totals[0]
            for number, tokens in enumerate(prompts):
                spec = make_spec(tokens, max_tokens=NEW_TOKENS)
                got = await driver.generate(worker, worker, Key(f"{turn}-{number}"), spec)
                assert got == checkpoint.continue_greedily(tokens)
                await until_idle(worker)
            computed = worker.core.token_totals[0] - before
            if turn:
                assert computed < 5 * (16 + NEW_TOKENS)
        assert worker.core.pool.statistics().evicted_total > 0
        assert worker.tiers is not None
        assert worker.tiers.statistics()[0].loaded_total > 0
