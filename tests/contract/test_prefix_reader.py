"""Prefix fetch between two workers: what a reader may rely on, whatever happens to the holder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.engine.fake import FakeRunner
from kvmesh.kv.hashing import chain_hashes
from kvmesh.runtime import prefix_fetch
from kvmesh.runtime.fetch_result import FetchOptions, FetchOutcome
from kvmesh.runtime.worker_config import WorkerSection
from kvmesh.transfer.frames import BlockRun, GetFrame
from kvmesh.transfer.reader import ReadLease
from tests.contract.prefix_pair import (
    BLOCK_SIZE,
    ENGINE,
    HASHES,
    PROMPT,
    Pair,
    running,
    source_of,
)
from tests.faulty_link import Faults, faulty_link
from tests.transfer_pair import until
from tests.worker_driver import Key, make_spec, reference_tokens, running_worker, until_idle


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running() as pair:
        yield pair


@pytest.mark.parametrize("channels", ["local", "shm", "tcp"])
async def test_a_fetched_prefix_is_a_cached_prefix(channels: str) -> None:
    async with running(channels) as pair:
        result = await pair.fetch()
        assert result.outcome is FetchOutcome.FETCHED
        assert (result.num_blocks, result.num_fetched) == (37, 37)
        assert result.num_bytes == 37 * pair.reader.core.spec.layout.block_bytes
        await pair.until_idle()

        spec = make_spec(PROMPT, max_tokens=20)
        tokens = await pair.driver.generate(pair.reader, pair.reader, Key("r"), spec)
        assert tokens == reference_tokens(spec)
        assert pair.reader.core.statistics().cached_tokens_total == 37 * BLOCK_SIZE
        assert set(HASHES) <= set(pair.reader.core.pool.take_events().stored)


@pytest.mark.parametrize(
    "groups", [KvGroups((0, 40)), KvGroups((0,), 3), KvGroups((0, 40), 2), KvGroups((40,))]
)
async def test_every_kind_of_group_goes_on_behind_a_fetched_prefix(
    groups: KvGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvmesh.runtime.worker_building.load_runner",
        lambda config, *_: FakeRunner(num_blocks=config.num_blocks, groups=groups),
    )
    async with running() as pair:
        result = await pair.fetch()
        assert result.outcome is FetchOutcome.FETCHED
        assert result.num_blocks == 37
        await pair.until_idle()
        spec = make_spec(PROMPT, max_tokens=20)
        tokens = await pair.driver.generate(pair.reader, pair.reader, Key("r"), spec)
        assert tokens == reference_tokens(spec, groups=groups)
        assert pair.reader.core.statistics().cached_tokens_total == 37 * BLOCK_SIZE


async def test_readers_of_one_host_ask_one_holder_while_others_need_its_blocks() -> None:
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(running("shm,tcp"))
        section = WorkerSection(role="decode", channels="shm,tcp")
        readers = [pair.reader] + [
            await stack.enter_async_context(running_worker(replace(section, id=f"d{n}"), ENGINE))
            for n in range(3)
        ]
        pool, begin = pair.holder.core.pool, pair.holder.pool.begin_read

        def evict_and_begin(get: GetFrame) -> object:
            pool.release(pool.allocate(pool.num_free))  # all that nobody reads
            return begin(get)

        pair.holder.pool.begin_read = evict_and_begin  # type: ignore[method-assign, assignment]
        source = source_of(pair.holder)
        results = await asyncio.gather(*(each.fetcher.fetch(source, HASHES) for each in readers))
        # All of them had their lease before the blocks were wanted, or found nothing any more.
        kept = [each for each in results if each.outcome is FetchOutcome.FETCHED]
        assert kept
        assert {each.num_blocks for each in kept} == {len(HASHES)}
        assert {each.num_blocks for each in results} <= {0, len(HASHES)}
        await until_idle(pair.holder, *readers)
        memory = pair.holder._runner.kv
        for reader in readers:
            assert reader.core.pool.is_idle
            blocks = reader.core.pool.match(HASHES)
            assert len(blocks) in (0, len(HASHES))
            theirs = b"".join(bytes(reader._runner.kv.read_view(each, 1)) for each in blocks)
            mine = b"".join(bytes(memory.read_view(each, 1)) for each in pool.match(HASHES))
            assert not blocks or not mine or theirs == mine
        assert pair.holder.pool.statistics().num_blocks == 0


async def test_another_worker_at_the_holders_address_is_not_read(pair: Pair) -> None:
    stranger = replace(source_of(pair.holder), worker_id=WorkerId("gone"))
    result = await pair.reader.fetcher.fetch(stranger, HASHES)
    assert (result.outcome, result.num_blocks) == (FetchOutcome.LOST, 0)


async def test_only_what_is_missing_is_read(pair: Pair) -> None:
    assert (await pair.fetch(HASHES[:10])).num_blocks == 10
    result = await pair.fetch()
    assert (result.num_blocks, result.num_fetched) == (37, 27)
    assert result.num_bytes == 27 * pair.reader.core.spec.layout.block_bytes
    assert (await pair.fetch()).outcome is FetchOutcome.HELD


async def test_two_fetches_at_once_leave_one_copy(pair: Pair) -> None:
    results = await asyncio.gather(pair.fetch(), pair.fetch())
    assert [each.num_blocks for each in results] == [37, 37]
    await pair.until_idle()
    assert pair.reader.core.pool.statistics().num_hashed == 37


async def test_another_tenants_prompt_cannot_be_fetched(pair: Pair) -> None:
    foreign = chain_hashes(BlockHash(bytes(16)), PROMPT, BLOCK_SIZE)
    result = await pair.fetch(foreign)
    assert (result.outcome, result.reason) == (FetchOutcome.REFUSED, "no_blocks")
    assert result.num_blocks == 0


async def test_another_life_of_the_holder_is_not_read(pair: Pair) -> None:
    stale = replace(source_of(pair.holder), incarnation=pair.holder.incarnation - 1)
    result = await pair.reader.fetcher.fetch(stale, HASHES)
    assert (result.outcome, result.reason) == (FetchOutcome.REFUSED, "stale")


async def test_a_holder_that_is_gone_is_lost(pair: Pair) -> None:
    async with running_worker(WorkerSection(id="gone"), ENGINE) as gone:
        source = source_of(gone)
    result = await pair.reader.fetcher.fetch(source, HASHES)
    assert result.outcome is FetchOutcome.LOST
    assert result.num_blocks == 0


async def test_a_reader_without_room_reads_nothing() -> None:
    async with running(num_blocks=20) as pair:
        result = await pair.fetch()
        assert result.outcome is FetchOutcome.NO_ROOM
        assert result.num_blocks == 0
        await pair.until_idle()
        assert (await pair.fetch(HASHES[:15])).num_blocks == 15


@asynccontextmanager
async def stalled(pair: Pair) -> AsyncIterator[None]:
    """The reader's connection to the holder is open, and nothing passes towards it any more."""
    endpoint = pair.holder.pool.data_endpoint
    assert endpoint is not None
    faults = Faults()
    async with faulty_link(endpoint, faults) as link:
        pair.holder.pool.data_endpoint = link
        assert (await pair.fetch(HASHES[:1])).num_blocks == 1
        faults.stall_at = faults.passed
        yield


def is_reading(pair: Pair) -> bool:
    return pair.reader.core.pool.statistics().num_referenced == len(HASHES)


async def test_a_cancelled_fetch_leaves_nothing(pair: Pair) -> None:
    async with stalled(pair):
        task = asyncio.create_task(pair.fetch())
        await until(lambda: is_reading(pair))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await pair.until_idle()
    assert len(pair.reader.core.pool.match(HASHES)) == 1


async def test_a_holder_that_goes_silent_is_lost_in_the_stall_time(pair: Pair) -> None:
    async with stalled(pair):
        result = await pair.fetch()
        assert (result.outcome, result.num_blocks) == (FetchOutcome.LOST, 1)
        # Nobody waits for it again so soon.
        again = await pair.fetch()
        assert (again.outcome, again.num_blocks) == (FetchOutcome.SHUNNED, 1)


async def test_a_fetch_that_takes_too_long_is_given_up(pair: Pair) -> None:
    async with stalled(pair):
        pair.reader.fetcher._options = FetchOptions(timeout_s=0.1)
        result = await pair.fetch()
        assert (result.outcome, result.num_blocks) == (FetchOutcome.TIMEOUT, 1)
        assert (await pair.fetch()).outcome is FetchOutcome.SHUNNED, "it brought nothing"


async def test_a_copy_that_is_late_keeps_no_request_from_its_holder(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies go last within a holder's budget: their pace says nothing of the holder."""
    fetcher = pair.reader.fetcher
    monkeypatch.setattr(prefix_fetch, "FIRST_SLICE_BYTES", 1)
    read, num_reads = fetcher._reader.get, 0

    async def read_once(lease: ReadLease, runs: list[BlockRun], into: list[memoryview]) -> None:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 2:
            raise TimeoutError  # as the time for a fetch does when it is over
        await read(lease, runs, into)

    monkeypatch.setattr(fetcher._reader, "get", read_once)
    late = await pair.fetch()
    assert (late.outcome, late.num_blocks) == (FetchOutcome.TIMEOUT, 1)
    assert (await pair.fetch()).outcome is FetchOutcome.FETCHED


async def test_what_a_copy_takes_says_nothing_of_what_a_request_would_pay(pair: Pair) -> None:
    source, fetcher = source_of(pair.holder), pair.reader.fetcher
    assert (await pair.fetch()).outcome is FetchOutcome.FETCHED
    ((key, meter),) = fetcher.statistics().links.items()
    assert (key.channel, meter.bytes > 0) == ("copy", True)
    assert fetcher.estimate_s(source, 10) is None
    meter.busy_s += 1000.0
    pool = pair.reader.core.pool
    pool.release(pool.allocate(pool.num_free))  # evicts the copy
    attempt = make_spec(PROMPT, max_tokens=1)
    await pair.driver.generate_from(source, pair.reader, pair.reader, attempt)
    estimate_s = fetcher.estimate_s(source, 10)
    assert estimate_s is not None
    assert estimate_s < 1.0


async def test_a_copy_is_read_in_slices_that_are_soon_here(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, read = list[int](), pair.reader.fetcher._reader.get

    async def noted(lease: ReadLease, runs: list[BlockRun], into: list[memoryview]) -> None:
        sizes.append(runs[0].count)
        await read(lease, runs, into)

    monkeypatch.setattr(pair.reader.fetcher._reader, "get", noted)
    monkeypatch.setattr(prefix_fetch, "COPY_SLICE_BYTES", pair.reader.core.spec.layout.block_bytes)
    assert (await pair.fetch()).num_blocks == len(HASHES)
    assert sizes == [1] * len(HASHES)


async def test_what_arrived_before_a_loss_counts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = pair.reader.core.spec.layout.block_bytes
    monkeypatch.setattr(prefix_fetch, "SLICE_BYTES", 10 * block_bytes)
    begin = pair.holder.pool.begin_read
    num_reads = 0

    def close_third(get: GetFrame) -> object:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 3:
            pair.holder.pool._table.expire(float("inf"))
        return begin(get)

    monkeypatch.setattr(pair.holder.pool, "begin_read", close_third)
    result = await pair.fetch()
    assert (result.outcome, result.reason) == (FetchOutcome.REFUSED, "stale")
    assert (result.num_blocks, result.num_fetched) == (20, 20)
    (link,) = pair.reader.fetcher.statistics().links.values()
    assert link.bytes == 20 * block_bytes, "the link has shown its pace"
    await pair.until_idle()
    spec = make_spec(PROMPT, max_tokens=5)
    tokens = await pair.driver.generate(pair.reader, pair.reader, Key("r"), spec)
    assert tokens == reference_tokens(spec)
    assert pair.reader.core.statistics().cached_tokens_total == 20 * BLOCK_SIZE


async def test_slices_grow_from_a_small_first_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = pair.reader.core.spec.layout.block_bytes
    monkeypatch.setattr(prefix_fetch, "FIRST_SLICE_BYTES", 4 * block_bytes)
    monkeypatch.setattr(prefix_fetch, "SLICE_BYTES", 10 * block_bytes)
    begin = pair.holder.pool.begin_read
    slices: list[int] = []

    def note(get: GetFrame) -> object:
        slices.append(get.num_blocks)
        return begin(get)

    monkeypatch.setattr(pair.holder.pool, "begin_read", note)
    assert (await pair.fetch()).num_blocks == 37
    assert slices == [4, 8, 10, 10, 5]
