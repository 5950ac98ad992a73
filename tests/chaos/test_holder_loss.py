"""Prefixes that lie on other workers: found again after a restart, and lost while they are read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh.core.types import Endpoint, PrefixSource
from kvmesh.kv.hashing import chain_hashes
from kvmesh.rpc.pool_client import PoolClient
from kvmesh.runtime import borrowed_leases, prefix_fetch
from kvmesh.runtime.fetch_result import FetchOutcome
from kvmesh.runtime.worker_config import EngineSection, FetchSection, WorkerSection
from kvmesh.transfer.reader import ReadLease
from kvmesh.transfer.server_channel import ServerChannel
from kvmesh.v1 import kv_pool_service_pb2 as pb
from tests.e2e.api_client import ApiClient, placed
from tests.faulty_link import Faults, faulty_link
from tests.mesh_processes import BLOCK_SIZE, MODEL, MODEL_FOLDER, VOCAB_SIZE, Mesh, fake_tokens
from tests.peer_process import Peer
from tests.waiting import until
from tests.worker_driver import (
    ROOT,
    Driver,
    Key,
    driving,
    make_spec,
    running_worker,
    until_idle,
)

NUM_BLOCKS = 125
DRAW = random.Random(12)
PROMPT = [DRAW.randrange(3, VOCAB_SIZE) for _ in range(NUM_BLOCKS * BLOCK_SIZE + 5)]
HASHES = chain_hashes(ROOT, PROMPT, BLOCK_SIZE)
ENGINE = EngineSection(kind="fake", model=str(MODEL_FOLDER), model_name=MODEL)


async def test_a_restarted_worker_fetches_what_it_has_lost(pair: Mesh) -> None:
    async with ApiClient(pair.url) as client:
        apart = placed("disaggregated")
        first = await client.complete(PROMPT, max_tokens=8, headers=apart)
        await pair.idle()
        pair["prefill-0"].kill()
        await pair.restart("prefill-0")
        await pair.all_known()

        async def is_known_to_decode_alone() -> bool:
            known = await pair["kvmanager"].metrics()
            return known.value("kvmesh_kvmanager_blocks") >= NUM_BLOCKS

        await until(is_known_to_decode_alone, "the decode worker's blocks are known")
        again = await client.complete(PROMPT, max_tokens=8, headers=apart)
    assert again.token_ids == first.token_ids == fake_tokens(PROMPT, 8)
    assert again.headers["x-kvmesh-decision"] == "fetch; prefill=prefill-0; decode=decode-0"
    assert again.cached_tokens == NUM_BLOCKS * BLOCK_SIZE
    reader, holder = await pair["prefill-0"].metrics(), await pair["decode-0"].metrics()
    assert reader.value("kvmesh_prefix_fetched_tokens_total") == NUM_BLOCKS * BLOCK_SIZE
    assert holder.value("kvmesh_pool_leases_opened_total") == 1
    await pair.idle()
    assert (await pair["decode-0"].metrics()).value("kvmesh_pool_leases") == 0


async def prime(peer: Peer, driver: Driver) -> None:
    """Lets a worker compute the prompt, and keep it."""
    await driver.connect_to(peer.worker_id, peer.child.address)
    spec = make_spec(PROMPT, max_tokens=1)
    await driver.start(peer, Key("prime"), spec)
    first = await driver.decode_event(Key("prime"))
    assert first.prefill.WhichOneof("event") == "first_token"


@asynccontextmanager
async def held_up(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """All reads go over a link that can be held up."""
    async with AsyncExitStack() as links:
        endpoints: dict[Endpoint, Endpoint] = {}
        plain = borrowed_leases.lease_of

        def lease_over_link(message: pb.ReadLease) -> ReadLease:
            lease = plain(message)
            return replace(lease, data_endpoint=endpoints[lease.data_endpoint])

        async def know(message: pb.ReadLease) -> None:
            there = plain(message).data_endpoint
            if there not in endpoints:
                endpoints[there] = await links.enter_async_context(faulty_link(there, faults))

        ask = PoolClient.lease

        async def lease(
            self: PoolClient, holder: Endpoint, request: pb.LeaseBlocksRequest, timeout_s: float
        ) -> pb.ReadLease:
            message = await ask(self, holder, request, timeout_s)
            await know(message)
            return message

        monkeypatch.setattr(PoolClient, "lease", lease)
        monkeypatch.setattr(prefix_fetch, "lease_of", lease_over_link)
        yield


async def test_a_holder_that_is_killed_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = Peer.make("holder", tmp_path)
    holder.child.start()
    section = WorkerSection(id="reader", channels="tcp")
    faults = Faults()
    try:
        await holder.child.ready()
        async with (
            held_up(faults, monkeypatch),
            running_worker(section, ENGINE) as reader,
            driving(reader) as driver,
        ):
            await prime(holder, driver)
            source = holder.source(NUM_BLOCKS)
            one = await reader.fetcher.fetch(source, HASHES[:1])
            assert one.outcome is FetchOutcome.FETCHED
            faults.stall_at = faults.passed

            spec = make_spec(PROMPT, max_tokens=8)
            request = asyncio.create_task(driver.generate_from(source, reader, reader, spec))
            links = reader.fetcher.statistics().links
            await until(lambda: any(m.queued_bytes for m in links.values()), "it is being read")
            assert not request.done()
            holder.child.kill()
            tokens, cached = await request
            assert tokens == fake_tokens(PROMPT, 8)
            assert cached == BLOCK_SIZE, "only what had come before"
            await until_idle(reader)
    finally:
        if holder.child.running:
            holder.child.kill()


async def test_a_reader_that_is_killed_while_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had leased and was in the middle of is the holder's again."""
    reader = Peer.make("reader", tmp_path)
    reader.child.start()
    is_gone = asyncio.Event()
    give = ServerChannel._give

    async def give_too_late(channel: ServerChannel, *args: Any) -> None:
        await is_gone.wait()
        await give(channel, *args)

    monkeypatch.setattr(ServerChannel, "_give", give_too_late)
    section = WorkerSection(id="holder", channels="tcp")
    try:
        await reader.child.ready()
        async with (
            running_worker(section, ENGINE, fetch=FetchSection(lease_s=0.5)) as holder,
            driving(holder) as driver,
        ):
            await driver.generate(holder, holder, Key("prime"), make_spec(PROMPT, max_tokens=1))
            await until_idle(holder)
            await driver.connect_to(reader.worker_id, reader.child.address)
            endpoint = holder._info.control_endpoint
            source = PrefixSource(holder.worker_id, holder.incarnation, endpoint, NUM_BLOCKS)
            await driver.start(reader, Key("r"), make_spec(PROMPT, max_tokens=8), source)
            table = holder.pool.statistics
            await until(lambda: table().num_reads, "it is being read")
            reader.child.kill()
            await until(lambda: table().expired_total, "the lease has ended")
            assert (table().num_ended, table().num_blocks) == (1, NUM_BLOCKS)
            assert not holder.core.pool.is_idle, "blocks stay while somebody is in them"
            is_gone.set()
            await until_idle(holder)
            assert table().num_blocks == 0
            holder.pool.check_integrity()
    finally:
        if reader.child.running:
            reader.child.kill()
