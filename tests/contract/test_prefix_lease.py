"""Prefix fetch between two workers: what a reader may rely on, whatever happens to the holder."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from kvmesh.core.errors import RefusedError
from kvmesh.core.types import BlockHash, PrefixSource, RefusalReason, WorkerId
from kvmesh.engine.fake import FakeRunner
from kvmesh.kv.groups import KvGroups
from kvmesh.kv.hashing import chain_hashes, join_hashes
from kvmesh.rpc.convert import kv_layout_to_proto
from kvmesh.rpc.pool_client import PoolClient
from kvmesh.runtime import borrowed_leases, prefix_fetch
from kvmesh.runtime.fetch_result import FetchOptions, FetchOutcome, FetchResult
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, FetchSection, WorkerSection
from kvmesh.transfer.frames import BlockRun, GetFrame
from kvmesh.transfer.reader import ReadLease
from kvmesh.v1 import kv_pool_service_pb2 as pb
from tests.faulty_link import Faults, faulty_link
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
ENGINE = EngineSection(kind="fake", max_batch_tokens=64)
PROMPT = [random.Random(5).randrange(1, 1000) for _ in range(600)]
HASHES = chain_hashes(ROOT, PROMPT, BLOCK_SIZE)


def source_of(holder: Worker, num_blocks: int = len(HASHES)) -> PrefixSource:
    info = holder._info
    return PrefixSource(info.worker_id, info.incarnation, info.control_endpoint, num_blocks)


@dataclass
class Pair:
    """A holder that has computed the prompt, and a reader that has not."""

    holder: Worker
    reader: Worker
    driver: Driver

    async def fetch(self, hashes: list[BlockHash] | None = None) -> FetchResult:
        wanted = HASHES if hashes is None else hashes
        return await self.reader.fetcher.fetch(source_of(self.holder), wanted)

    async def lease(self, client: PoolClient, **changes: object) -> pb.ReadLease:
        request = pb.LeaseBlocksRequest(
            incarnation=self.holder.incarnation,
            reader_worker_id="reader",
            layout=kv_layout_to_proto(self.reader.core.spec.layout),
            block_hashes=join_hashes(HASHES),
        )
        for name, value in changes.items():
            setattr(request, name, value)
        return await client.lease(source_of(self.holder).control_endpoint, request, 5)

    async def until_idle(self) -> None:
        await until_idle(self.holder, self.reader)
        assert self.holder.pool.statistics().num_open == 0
        self.holder.pool.check_integrity()


@asynccontextmanager
async def running(
    channels: str = "tcp", fetch: FetchSection | None = None, num_blocks: int = 512
) -> AsyncIterator[Pair]:
    section = WorkerSection(id="reader", channels=channels, stall_s=0.3)
    engine = replace(ENGINE, num_blocks=num_blocks)
    async with AsyncExitStack() as stack:
        holder = await stack.enter_async_context(
            running_worker(replace(section, id="holder"), ENGINE, fetch=fetch)
        )
        reader = await stack.enter_async_context(running_worker(section, engine, fetch=fetch))
        driver = await stack.enter_async_context(driving(holder, reader))
        spec = make_spec(PROMPT, max_tokens=1)
        await driver.generate(holder, holder, Key("prime"), spec)
        pair = Pair(holder, reader, driver)
        await pair.until_idle()
        yield pair
        await pair.until_idle()


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
        "kvmesh.runtime.worker.load_runner",
        lambda config: FakeRunner(num_blocks=config.num_blocks, groups=groups),
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


async def test_of_a_prompt_that_is_longer_than_the_holders_pool_its_start_is_leased(
    pair: Pair,
) -> None:
    client = PoolClient()
    rest = bytes(16 * pair.holder.core.pool.num_blocks)
    message = await pair.lease(client, block_hashes=join_hashes(HASHES) + rest)
    assert message.num_blocks == len(HASHES)
    pair.holder.pool._table.expire(float("inf"))
    pair.holder.pool._release()
    await client.close()


@pytest.mark.parametrize("why", ["incarnation", "layout", "hashes", "draining"])
async def test_a_lease_is_refused_with_its_reason(pair: Pair, why: str) -> None:
    layout = replace(pair.reader.core.spec.layout, head_dim=64)
    expected = {
        "incarnation": RefusalReason.STALE,
        "layout": RefusalReason.INVALID,
        "hashes": RefusalReason.INVALID,
        "draining": RefusalReason.DRAINING,
    }
    client = PoolClient()
    request = pb.LeaseBlocksRequest(
        incarnation=pair.holder.incarnation - (why == "incarnation"),
        layout=kv_layout_to_proto(layout if why == "layout" else pair.reader.core.spec.layout),
        block_hashes=b"short" if why == "hashes" else join_hashes(HASHES),
    )
    if why == "draining":
        await pair.holder.pool.drain()
    with pytest.raises(RefusedError) as caught:
        await client.lease(source_of(pair.holder).control_endpoint, request, 5)
    assert caught.value.refusal.reason is expected[why]
    await client.close()


async def test_a_holder_that_drains_lends_as_long_as_it_has_requests(pair: Pair) -> None:
    pair.holder.decode.draining = pair.holder.prefill.draining = pair.holder.pool.draining = True
    assert (await pair.fetch()).outcome is FetchOutcome.FETCHED


async def test_a_drain_waits_for_those_who_read_and_lends_nothing_more(pair: Pair) -> None:
    client = PoolClient()
    message = await pair.lease(client)
    leaving = asyncio.create_task(pair.holder.pool.drain())
    result = await pair.fetch()
    assert (result.outcome, result.reason) == (FetchOutcome.REFUSED, "draining")
    into = memoryview(bytearray(pair.reader.core.spec.layout.block_bytes))
    lease = borrowed_leases.lease_of(message)
    await pair.reader.fetcher._reader.get(lease, [BlockRun(0, 1)], [into])
    assert not leaving.done()
    request = pb.ReleaseBlocksRequest(
        incarnation=lease.incarnation, lease_id=lease.lease_id, capability=lease.capability
    )
    await client.release(source_of(pair.holder).control_endpoint, request, 5)
    await leaving
    await client.close()


@pytest.mark.parametrize("how", ["stopped", "ordered"])
async def test_a_drain_that_readers_hold_up_says_goodbye(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A lease lasts for seconds after its last read; neither kind of drain waits for its end."""
    said: list[str] = []
    over = asyncio.Event()

    async def goodbye(reason: str) -> None:
        said.append(reason)
        over.set()

    client, holder = PoolClient(), pair.holder
    monkeypatch.setattr(holder._registration, "goodbye", goodbye)
    lease = await pair.lease(client)
    if how == "stopped":
        await holder._context.drain(0.05)
    else:
        server = replace(holder._config.server, drain_s=0.05)
        monkeypatch.setattr(holder, "_config", replace(holder._config, server=server))
        holder._ordered_to_drain("an upgrade")
        await over.wait()
    assert said == ["cut off" if how == "stopped" else "drained"]
    assert holder.pool.statistics().num_open == 1
    request = pb.ReleaseBlocksRequest(
        incarnation=lease.incarnation, lease_id=lease.lease_id, capability=lease.capability
    )
    await client.release(source_of(holder).control_endpoint, request, 5)
    await client.close()


async def test_a_drain_does_not_wait_for_a_reader_that_is_gone() -> None:
    async with running(fetch=FetchSection(lease_s=0.2)) as pair:
        client = PoolClient()
        await pair.lease(client)
        await pair.holder.pool.drain()
        assert pair.holder.pool.statistics().expired_total == 1
        await client.close()


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


async def test_a_lease_that_nobody_reads_by_ends_and_admits_no_read() -> None:
    async with running(fetch=FetchSection(lease_s=0.2)) as pair:
        client = PoolClient()
        message = await pair.lease(client)
        assert message.num_blocks == message.num_leased == 37
        await until(lambda: pair.holder.pool.is_idle)
        lease = borrowed_leases.lease_of(message)
        into = memoryview(bytearray(pair.reader.core.spec.layout.block_bytes))
        with pytest.raises(RefusedError) as caught:
            await pair.reader.fetcher._reader.get(lease, [BlockRun(0, 1)], [into])
        assert caught.value.refusal.reason is RefusalReason.STALE
        await client.close()


async def test_no_more_is_leased_than_allowed() -> None:
    async with running(fetch=FetchSection(max_leases=1)) as pair:
        client = PoolClient()
        message = await pair.lease(client)
        result = await pair.fetch()
        assert (result.outcome, result.reason) == (FetchOutcome.REFUSED, "busy")
        request = pb.ReleaseBlocksRequest(
            incarnation=message.incarnation,
            lease_id=message.lease_id,
            capability=message.capability,
        )
        assert await client.release(source_of(pair.holder).control_endpoint, request, 5)
        assert (await pair.fetch()).outcome is FetchOutcome.FETCHED
        await client.close()


async def test_leased_blocks_outlive_the_need_for_room(pair: Pair) -> None:
    client, pool = PoolClient(), pair.holder.core.pool
    message = await pair.lease(client)
    taken = pool.allocate(pool.num_free)  # evicts all that is not held
    assert pool.match(HASHES) != []
    lease = borrowed_leases.lease_of(message)
    into = bytearray(37 * pair.reader.core.spec.layout.block_bytes)
    run = BlockRun(0, 37)
    await pair.reader.fetcher._reader.get(lease, [run], [memoryview(into)])
    held = [bytes(pair.holder._runner.kv.read_view(block, 1)) for block in pool.match(HASHES)]
    assert bytes(into) == b"".join(held)
    pool.release(taken)
    request = pb.ReleaseBlocksRequest(
        incarnation=lease.incarnation, lease_id=lease.lease_id, capability=lease.capability
    )
    await client.release(source_of(pair.holder).control_endpoint, request, 5)
    await client.close()


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
