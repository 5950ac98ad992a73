"""Requests that want one prefix of another worker: fetched once, and nobody depends on another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvmesh.core.errors import LostError
from kvmesh.core.types import BlockHash, PrefixSource, SequenceSpec
from kvmesh.kv.hashing import chain_hashes
from kvmesh.runtime import prefix_fetch
from kvmesh.runtime.fetch_result import FetchOptions, FetchOutcome, FetchResult
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, WorkerSection
from tests.transfer_pair import until
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
NUM_BLOCKS = 30
ENGINE = EngineSection(kind="fake", max_batch_tokens=64)
DRAW = random.Random(8)
PREFIX = [DRAW.randrange(1, 1000) for _ in range(NUM_BLOCKS * BLOCK_SIZE)]
HASHES = chain_hashes(ROOT, PREFIX, BLOCK_SIZE)


def prompt(number: int) -> SequenceSpec:
    """The prefix, and an end of its own."""
    return make_spec([*PREFIX, *range(number + 1, number + 21)], max_tokens=4)


@dataclass
class Gate:
    """Calls of one function: counted, and held up until the test lets them go on."""

    inner: Callable[..., Awaitable[Any]]
    num_calls: int = 0
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, *args: Any) -> Any:
        self.num_calls += 1
        await self.opened.wait()
        return await self.inner(*args)


class Stage:
    """A holder that has computed the prefix, and a reader that has not."""

    def __init__(self, holder: Worker, reader: Worker, driver: Driver) -> None:
        self.holder, self.reader, self.driver = holder, reader, driver
        fetcher = reader.fetcher
        self.leases = Gate(fetcher.leases._client.lease)
        fetcher.leases._client.lease = self.leases  # type: ignore[method-assign, assignment]

    @property
    def source(self) -> PrefixSource:
        info = self.holder._info
        return PrefixSource(info.worker_id, info.incarnation, info.control_endpoint, NUM_BLOCKS)

    def begin(self, hashes: list[BlockHash] | None = None) -> asyncio.Task[FetchResult]:
        """A fetch of its own task."""
        wanted = HASHES if hashes is None else hashes
        return asyncio.create_task(self.reader.fetcher.fetch(self.source, wanted))

    async def first(self) -> asyncio.Task[FetchResult]:
        """One that asks the holder, and is held up."""
        before = self.leases.num_calls
        task = self.begin()
        await until(lambda: self.leases.num_calls > before)
        return task

    async def waiting(self, hashes: list[BlockHash] | None = None) -> asyncio.Task[FetchResult]:
        """One that waits for the first."""
        before = self.reader.core.fills.num_open
        task = self.begin(hashes)
        await until(lambda: self.reader.core.fills.num_open > before)
        return task

    def num_cached(self) -> int:
        return len(self.reader.core.pool.match(HASHES))


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        holder, reader = [
            await stack.enter_async_context(
                running_worker(WorkerSection(id=name, prefill_slots=16, decode_slots=16), ENGINE)
            )
            for name in ("holder", "reader")
        ]
        driver = await stack.enter_async_context(driving(holder, reader))
        await driver.generate(holder, holder, Key("prime"), make_spec(PREFIX, max_tokens=1))
        await until_idle(holder)
        yield Stage(holder, reader, driver)
        await until_idle(holder, reader)
        for worker in (holder, reader):
            worker.core.pool.check_integrity()
            worker.pool.check_integrity()
            assert worker.core.pool.is_idle


@pytest.mark.parametrize("placement", ["disaggregated", "aggregated"])
async def test_many_requests_for_one_prefix_fetch_it_once(stage: Stage, placement: str) -> None:
    decode = stage.holder if placement == "disaggregated" else stage.reader
    specs = [prompt(number) for number in range(6)]
    requests = [
        asyncio.create_task(stage.driver.generate_from(stage.source, stage.reader, decode, spec))
        for spec in specs
    ]
    await until(lambda: stage.reader.core.fills.num_open == len(specs))
    stage.leases.opened.set()
    for spec, (tokens, cached) in zip(specs, await asyncio.gather(*requests), strict=True):
        assert tokens == reference_tokens(spec)
        assert cached == len(PREFIX)
    assert stage.leases.num_calls == stage.holder.pool.statistics().opened_total == 1
    assert stage.reader.core.token_totals[0] < len(PREFIX), "nobody computed it"
    assert stage.num_cached() == NUM_BLOCKS


async def test_a_cancel_of_the_one_that_fetches_lets_the_next_go_on(stage: Stage) -> None:
    first = await stage.first()
    others = [await stage.waiting() for _ in range(3)]
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert first.cancelled()
    stage.leases.opened.set()
    results = await asyncio.gather(*others)
    assert sorted(each.outcome.value for each in results) == ["fetched", "shared", "shared"]
    assert {each.num_blocks for each in results} == {NUM_BLOCKS}
    assert sum(each.num_fetched for each in results) == NUM_BLOCKS
    # The lease of the one that was cancelled was granted, too, and went back.
    await until(lambda: stage.holder.pool.is_idle)
    leases = stage.holder.pool.statistics()
    assert (leases.opened_total, leases.expired_total) == (2, 0)


async def test_a_cancel_of_one_that_waits_disturbs_nobody(stage: Stage) -> None:
    first = await stage.first()
    gone, stays = await stage.waiting(), await stage.waiting()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    stage.leases.opened.set()
    assert (await first).outcome is FetchOutcome.FETCHED
    assert (await stays).outcome is FetchOutcome.SHARED
    assert stage.leases.num_calls == 1


async def test_one_that_waits_gives_up_at_its_own_time(stage: Stage) -> None:
    first = await stage.first()
    stage.reader.fetcher._options = FetchOptions(timeout_s=0.02)
    late = await stage.begin()
    assert (late.outcome, late.num_blocks) == (FetchOutcome.TIMEOUT, 0)
    stage.leases.opened.set()
    # The holder was not to blame.
    assert (await first).outcome is FetchOutcome.FETCHED


async def test_a_holder_is_not_blamed_for_the_time_that_was_spent_on_another_fetch(
    stage: Stage,
) -> None:
    first = await stage.first()
    stage.reader.fetcher._options = FetchOptions(timeout_s=0.5)
    late = await stage.waiting()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert (await late).outcome is FetchOutcome.TIMEOUT
    assert not stage.reader.fetcher.leases.is_shunned(stage.source)
    stage.reader.fetcher._options = FetchOptions(timeout_s=0.02)
    alone = await stage.begin()
    assert alone.outcome is FetchOutcome.TIMEOUT
    assert stage.reader.fetcher.leases.is_shunned(stage.source)
    stage.leases.opened.set()


async def test_a_refusal_is_told_to_all_who_waited(stage: Stage) -> None:
    stage.holder.pool._table._max_leases = 0
    first = await stage.first()
    others = [await stage.waiting() for _ in range(3)]
    stage.leases.opened.set()
    for result in await asyncio.gather(first, *others):
        assert (result.outcome, result.reason) == (FetchOutcome.REFUSED, "busy")
    assert stage.leases.num_calls == 1


async def test_who_waits_for_a_holder_that_is_lost_computes(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_args: object) -> None:
        raise LostError("the link is cut")

    monkeypatch.setattr(stage.reader.fetcher._reader, "get", lost)
    first = await stage.first()
    others = [await stage.waiting() for _ in range(2)]
    stage.leases.opened.set()
    assert (await first).outcome is FetchOutcome.LOST
    assert {(await each).outcome for each in others} == {FetchOutcome.SHUNNED}
    assert stage.leases.num_calls == 1


async def test_a_planned_copy_gives_way_to_a_request_that_wants_the_same(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits must not wait at the pace of what nobody waits for."""
    block_bytes = stage.reader.core.spec.layout.block_bytes
    monkeypatch.setattr(prefix_fetch, "FIRST_SLICE_BYTES", block_bytes)
    opened, begun = stage.holder.pool._table.open, list[bool]()

    def opening(*args: Any, is_planned: bool) -> Any:
        begun.append(is_planned)
        return opened(*args, is_planned=is_planned)

    monkeypatch.setattr(stage.holder.pool._table, "open", opening)
    planned = await stage.first()
    request = asyncio.create_task(
        stage.driver.generate_from(stage.source, stage.reader, stage.reader, prompt(0))
    )
    await until(lambda: stage.reader.core.fills.num_open == 2)
    stage.leases.opened.set()
    tokens, cached = await request
    assert (tokens, cached) == (reference_tokens(prompt(0)), len(PREFIX))
    result = await planned
    assert (result.num_blocks, result.num_fetched) == (NUM_BLOCKS, 1)
    assert result.num_bytes == block_bytes
    assert begun == [True, False]
    assert stage.holder.pool.read_blocks_total == NUM_BLOCKS, "each block once"


async def test_of_a_longer_prefix_only_the_rest_is_fetched(stage: Stage) -> None:
    short = asyncio.create_task(stage.reader.fetcher.fetch(stage.source, HASHES[:10]))
    await until(lambda: stage.leases.num_calls == 1)
    long = await stage.waiting()
    stage.leases.opened.set()
    assert (await short).num_fetched == 10
    result = await long
    assert (result.outcome, result.num_fetched) == (FetchOutcome.FETCHED, NUM_BLOCKS - 10)
    assert result.num_blocks == NUM_BLOCKS


async def test_a_prefix_that_is_computed_here_meanwhile_is_kept_once(stage: Stage) -> None:
    gets = Gate(stage.reader.fetcher._reader.get)
    stage.reader.fetcher._reader.get = gets  # type: ignore[method-assign, assignment]
    stage.leases.opened.set()
    fetch = stage.begin()
    await until(lambda: gets.num_calls == 1)
    spec = prompt(0)
    tokens = await stage.driver.generate(stage.reader, stage.reader, Key("local"), spec)
    assert tokens == reference_tokens(spec)
    cached = stage.reader.core.pool.match(HASHES)
    gets.opened.set()
    assert (await fetch).num_blocks == NUM_BLOCKS
    await until_idle(stage.reader)
    assert stage.reader.core.pool.match(HASHES) == cached
    statistics = stage.reader.core.pool.statistics()
    assert statistics.num_evictable == statistics.num_hashed == len(spec.token_ids) // BLOCK_SIZE


async def test_what_came_here_after_the_reservation_is_not_fetched(stage: Stage) -> None:
    spec, key = prompt(0), Key("r")
    reserved = await stage.driver.reserve(stage.reader, key, spec)
    await stage.driver.generate(stage.reader, stage.reader, Key("other"), prompt(1))
    await stage.driver.offer_from(stage.source, stage.reader, key, spec, reserved.reserved)
    first = (await stage.driver.prefill_event(key)).first_token
    assert first.token_id == reference_tokens(spec)[0]
    assert first.cached_tokens == len(PREFIX)
    assert stage.leases.num_calls == 0
    stage.driver.cancel_decode(stage.reader, key)
