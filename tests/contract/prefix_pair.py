"""Two workers: one holds the KV of a prompt, the other may fetch it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from kvmesh.core.types import BlockHash, PrefixSource
from kvmesh.kv.hashing import chain_hashes, join_hashes
from kvmesh.rpc.convert import kv_layout_to_proto
from kvmesh.rpc.pool_client import PoolClient
from kvmesh.runtime.fetch_result import FetchResult
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, FetchSection, WorkerSection
from kvmesh.v1 import kv_pool_service_pb2 as pb
from tests.worker_driver import (
    ROOT,
    Driver,
    Key,
    driving,
    make_spec,
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

    async def give_back(self, client: PoolClient, lease: pb.ReadLease) -> bool:
        request = pb.ReleaseBlocksRequest(
            incarnation=lease.incarnation, lease_id=lease.lease_id, capability=lease.capability
        )
        return await client.release(source_of(self.holder).control_endpoint, request, 5)

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
