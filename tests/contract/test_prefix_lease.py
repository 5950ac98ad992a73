"""Leases of cached blocks: what a holder lends, to whom, and how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvmesh.core.errors import RefusedError
from kvmesh.core.types import RefusalReason
from kvmesh.kv.hashing import join_hashes
from kvmesh.rpc.convert import kv_layout_to_proto
from kvmesh.rpc.pool_client import PoolClient
from kvmesh.runtime import borrowed_leases
from kvmesh.runtime.fetch_result import FetchOutcome
from kvmesh.runtime.worker_config import FetchSection
from kvmesh.transfer.frames import BlockRun
from kvmesh.v1 import kv_pool_service_pb2 as pb
from tests.contract.prefix_pair import HASHES, Pair, running, source_of
from tests.transfer_pair import until


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running() as pair:
        yield pair


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
    await pair.give_back(client, message)
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
    await pair.give_back(client, lease)
    await client.close()


async def test_a_drain_does_not_wait_for_a_reader_that_is_gone() -> None:
    async with running(fetch=FetchSection(lease_s=0.2)) as pair:
        client = PoolClient()
        await pair.lease(client)
        await pair.holder.pool.drain()
        assert pair.holder.pool.statistics().expired_total == 1
        await client.close()


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
        assert await pair.give_back(client, message)
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
    await pair.give_back(client, message)
    await client.close()
