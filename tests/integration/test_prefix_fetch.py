"""Prompts whose prefix lies on another worker: fetched before they are computed, same tokens."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.core.types import PrefixSource
from kvmesh.kv.hashing import chain_hashes
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import DataSection, EngineSection, FetchSection, WorkerSection
from kvmesh.transfer.pacing import Pacer, Share, Ticket
from tests.integration.families import NEW_TOKENS, Checkpoint
from tests.transfer_pair import until
from tests.worker_driver import (
    Driver,
    Key,
    driving,
    make_spec,
    reference_tokens,
    running_worker,
    until_idle,
)

ENGINE = EngineSection(kind="fake", max_batch_tokens=64)
DRAW = random.Random(6)
PREFIX = [DRAW.randrange(1, 1000) for _ in range(480)]
SPEC = make_spec(PREFIX + [DRAW.randrange(1, 1000) for _ in range(40)], max_tokens=8)


def source_of(holder: Worker, num_blocks: int = 100) -> PrefixSource:
    info = holder._info
    return PrefixSource(info.worker_id, info.incarnation, info.control_endpoint, num_blocks)


async def prime(driver: Driver, holder: Worker) -> None:
    """The holder computes the prefix, and keeps it."""
    await driver.generate(holder, holder, Key("prime"), make_spec(PREFIX, max_tokens=1))
    await until_idle(holder)


@pytest.fixture
async def holder() -> AsyncIterator[Worker]:
    async with running_worker(WorkerSection(id="holder"), ENGINE) as worker:
        yield worker


@pytest.fixture
async def reader() -> AsyncIterator[Worker]:
    async with running_worker(WorkerSection(id="reader"), ENGINE) as worker:
        yield worker


@pytest.fixture
async def decode() -> AsyncIterator[Worker]:
    async with running_worker(WorkerSection(id="decode"), ENGINE) as worker:
        yield worker


@pytest.fixture
async def driver(holder: Worker, reader: Worker, decode: Worker) -> AsyncIterator[Driver]:
    async with driving(holder, reader, decode) as driver:
        await prime(driver, holder)
        yield driver
        await until_idle(holder, reader, decode)


@pytest.mark.parametrize("mode", ["disaggregated", "aggregated", "in one message"])
async def test_the_prefix_is_fetched_and_the_rest_computed(
    holder: Worker, reader: Worker, decode: Worker, driver: Driver, mode: str
) -> None:
    source = source_of(holder)
    if mode == "disaggregated":
        tokens, cached = await driver.generate_from(source, reader, decode, SPEC)
    elif mode == "aggregated":
        tokens, cached = await driver.generate_from(source, reader, reader, SPEC)
    else:
        tokens, cached = await driver.start_from(source, reader, SPEC)
    assert tokens == reference_tokens(SPEC)
    assert cached == 480
    assert reader.core.token_totals[0] < 100
    assert holder.pool.statistics().opened_total == 1


async def test_what_a_reader_fetches_is_within_the_holders_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = []

    def ask(_: Pacer, num_bytes: int, share: Share, go: Callable[[], None]) -> Ticket:
        taken.append((share, num_bytes))
        go()
        return Ticket(num_bytes, share, go)

    monkeypatch.setattr(Pacer, "ask", ask)
    over_tcp = WorkerSection(id="reader", channels="tcp")
    async with (
        running_worker(WorkerSection(id="h"), ENGINE, data=DataSection(egress_mb_s=9)) as holder,
        running_worker(over_tcp, ENGINE) as reader,
        driving(holder, reader) as driver,
    ):
        await prime(driver, holder)
        tokens, _ = await driver.generate_from(source_of(holder), reader, reader, SPEC)
        assert tokens == reference_tokens(SPEC)
        prefix_bytes = len(PREFIX) // 16 * holder.core.spec.layout.block_bytes
        assert sum(size for share, size in taken if share is Share.READ) == prefix_bytes
        await until_idle(holder, reader)

        # A planned copy, which no request waits for.
        taken.clear()
        reader.core.pool.clear_cached()
        hashes = chain_hashes(SPEC.root_hash, PREFIX, 16)
        result = await reader.fetcher.fetch(source_of(holder), hashes)
        assert result.num_fetched == len(hashes)
        assert {share for share, _ in taken} == {Share.COPY}
        await until_idle(holder, reader)


async def test_what_is_here_already_is_not_asked_for(
    holder: Worker, reader: Worker, decode: Worker, driver: Driver
) -> None:
    for _ in range(2):
        tokens, cached = await driver.generate_from(source_of(holder), reader, decode, SPEC)
        assert tokens == reference_tokens(SPEC)
        assert cached >= 480
        await until_idle(reader, decode)
    short = source_of(holder, num_blocks=20)
    await driver.generate_from(short, reader, decode, SPEC)
    assert holder.pool.statistics().opened_total == 1


async def test_a_refusal_costs_nothing_but_the_computation(
    holder: Worker, reader: Worker, decode: Worker, driver: Driver
) -> None:
    stale = replace(source_of(holder), incarnation=1)
    tokens, cached = await driver.generate_from(stale, reader, decode, SPEC)
    assert tokens == reference_tokens(SPEC)
    assert cached == 0


async def test_a_worker_that_may_not_fetch_computes(
    holder: Worker, decode: Worker, driver: Driver
) -> None:
    alone = running_worker(WorkerSection(id="alone"), ENGINE, fetch=FetchSection(enabled=False))
    async with alone as worker, driving(worker, decode) as other:
        tokens, cached = await other.generate_from(source_of(holder), worker, decode, SPEC)
        assert tokens == reference_tokens(SPEC)
        assert cached == 0
        await until_idle(worker, decode)
    assert holder.pool.statistics().opened_total == 0


@pytest.mark.parametrize("how", ["prefill", "decode", "disconnect"])
@pytest.mark.parametrize("placement", ["disaggregated", "aggregated"])
async def test_a_cancel_while_the_prefix_travels_frees_everything(
    holder: Worker, reader: Worker, decode: Worker, driver: Driver, how: str, placement: str
) -> None:
    where = decode if placement == "disaggregated" else reader
    key = Key("r")
    reserved = await driver.reserve(where, key, SPEC)
    pool, reads = holder.pool, 0
    begin = pool.begin_read

    def cancel_first(get: object) -> object:
        nonlocal reads
        reads += 1
        if how == "prefill":
            driver.cancel_prefill(reader, key)
        driver.cancel_decode(where, key)
        return begin(get)  # type: ignore[arg-type]

    pool.begin_read = cancel_first  # type: ignore[method-assign, assignment]
    await driver.offer_from(source_of(holder), reader, key, SPEC, reserved.reserved)
    await until(lambda: reads > 0)
    if how == "disconnect":
        await driver.disconnect(reader, "prefill")
    await until_idle(holder, reader, decode)


@pytest.mark.parametrize("family", ["gemma3", "qwen3-next"])
async def test_checkpoints_go_on_behind_a_fetched_prefix(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(family, tmp_path / "model")
    engine = EngineSection(
        model=str(checkpoint.folder), num_blocks=400, max_batch_tokens=48, state_interval_tokens=64
    )
    async with (
        running_worker(WorkerSection(id="p0", channels="tcp"), engine) as holder,
        running_worker(WorkerSection(id="p1", channels="tcp"), engine) as reader,
        driving(holder, reader) as driver,
    ):
        prompt, expected = checkpoint.prompts[4], checkpoint.expected[4]
        spec = make_spec(prompt, max_tokens=NEW_TOKENS)
        await driver.generate(holder, holder, Key("prime"), spec)
        tokens, cached = await driver.generate_from(source_of(holder), reader, reader, spec)
        assert tokens == expected
        assert cached == (len(prompt) - 1) // 16 * 16
        await until_idle(holder, reader)
