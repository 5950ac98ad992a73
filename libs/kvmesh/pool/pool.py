"""The interface of TokenLake's Figure 5 over a running mesh: three control and four data calls.

    async with open_pool("127.0.0.1:7102", ["127.0.0.1:7101"], "my-model", access) as pool:
        tree = pool.get_prefix_tree()
        plans = pool.gen_plans([hashes], [1], tree)

The caller does not need to know where the cache is, nor to be a worker. Bytes of KV and queries
travel over the workers' data channels, all else over gRPC. docs/pool.md describes the calls.
Source: TokenLake 3.2. Tests: tests/integration/test_pool_facade.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvmesh.core.clock import SystemClock
from kvmesh.core.details import FleetWorker
from kvmesh.core.errors import LostError
from kvmesh.core.types import BlockHash, KvLayout, WorkerId, WorkerInfo
from kvmesh.engine.host_memory import HostMemory
from kvmesh.kv.hashing import join_hashes
from kvmesh.policy.cache_load import CachedRequest, PoolHardware, cache_load
from kvmesh.pool.buffers import KvBuffer, QueryBuffer
from kvmesh.pool.plans import PoolPlans, PrefixTree, QueryPlan, TransferPlan, gen_plans
from kvmesh.rpc.channels import NO_ACCESS, MeshAccess
from kvmesh.rpc.convert import kv_layout_to_proto
from kvmesh.rpc.fleet import FleetWatch
from kvmesh.rpc.pool_client import PoolClient
from kvmesh.rpc.prefix_feed import PrefixFeed
from kvmesh.runtime.borrowed_leases import lease_of
from kvmesh.transfer.alignment import align_to_reservation
from kvmesh.transfer.asker import Asker
from kvmesh.transfer.channel import SHM, TCP
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.frames import BlockRun
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.reader import BlockReader
from kvmesh.transfer.remote_attention import PartialAnswer
from kvmesh.v1 import kv_pool_service_pb2 as pb

CALL_S = 10.0
"""Timeout of a worker's answer, in seconds; it may have to load a prefix from disk first."""

LOOK_S = 0.05
"""Seconds between two polls of the index."""

_OPTIONS = SendOptions(kinds=(SHM, TCP))


class Pool:
    """The workers' caches of one model; see `open_pool`.

    Args:
        layout: of the workers' KV.
    """

    def __init__(
        self,
        model: str,
        layout: KvLayout,
        fleet: FleetWatch,
        feed: PrefixFeed,
        access: MeshAccess,
    ) -> None:
        self.layout = layout
        self._model = model
        self._fleet = fleet
        self._feed = feed
        name = WorkerId(f"pool-client-{uuid.uuid4().hex[:8]}")
        self._identity = ChannelIdentity(name, 1, layout, access.secret)
        self._client = PoolClient(access)
        self._reader = BlockReader(self._identity, _OPTIONS)
        self._asker = Asker(self._identity, _OPTIONS, SystemClock())
        self._rng = random.Random()

    # --- control -----------------------------------------------------------------------------

    def get_prefix_tree(self) -> PrefixTree:
        """Returns the present workers and the prefixes that they hold."""
        return PrefixTree(self._model, self._fleet.workers, self._feed.match)

    @staticmethod
    def get_cache_load(
        requests: Sequence[CachedRequest], compute_s: float, hardware: PoolHardware
    ) -> float:
        """Returns the share of every device, 0 to 1, that the pool takes for these requests.

        Args:
            compute_s: seconds that the requests take at least, with all devices fully used.
        """
        return cache_load(requests, compute_s, hardware)

    def gen_plans(
        self, batches: Sequence[Sequence[BlockHash]], degrees: Sequence[int], tree: PrefixTree
    ) -> PoolPlans:
        """See `plans.gen_plans`."""
        return gen_plans(batches, degrees, tree, self._rng)

    # --- data --------------------------------------------------------------------------------

    @asynccontextmanager
    async def init_query(
        self, plan: QueryPlan, num_queries: int, num_heads: int
    ) -> AsyncIterator[QueryBuffer]:
        """Pins a prefix at its holder, and allocates memory for queries to it.

        Args:
            num_queries: number of queries of one layer, at one time.
            num_heads: number of query heads.

        Raises:
            RefusedError: the holder has evicted the prefix, or grants no further lease.
            LostError: the holder does not answer.
        """
        async with self._leased(plan) as message:
            shape = num_queries, num_heads, self.layout.head_dim
            yield QueryBuffer(self._asker, message, shape, self.layout)

    async def query(self, buffer: QueryBuffer, layer: int) -> PartialAnswer:
        """Returns the attention of a buffer's queries over its prefix, computed at the holder.

        Returns:
            The partial output and its normaliser, to be merged with other parts.

        Raises:
            RefusedError, LostError: the holder did not compute it.
        """
        return await asyncio.to_thread(buffer.attend, layer)

    @asynccontextmanager
    async def init_transfer(self, plan: TransferPlan) -> AsyncIterator[KvBuffer]:
        """Reserves the missing blocks of a prefix at its target, and allocates memory for their KV.

        Raises:
            RefusedError: the target accepts no stores; see its `fetch.max_stores`.
            LostError: the target does not answer.
        """
        request = pb.StoreBlocksRequest(
            incarnation=plan.target.incarnation,
            layout=kv_layout_to_proto(self.layout),
            block_hashes=join_hashes(plan.hashes),
        )
        reservation = await self._client.store(plan.target.control_endpoint, request, CALL_S)
        num_blocks = 0 if reservation is None else reservation.num_blocks
        memory = HostMemory(max(num_blocks, 1), self.layout.block_bytes)
        try:
            yield KvBuffer(memory, reservation, num_blocks)
        finally:
            memory.close()

    async def put(self, buffer: KvBuffer) -> None:
        """Stores a buffer's blocks; when it returns, the target has the prefix.

        Raises:
            RefusedError: the reservation has expired, because no data arrived for too long.
            LostError: the connection to the target is lost.
        """
        if buffer.reservation is None:
            return
        channels = ChannelPool(self._identity, buffer.memory, _OPTIONS)
        try:
            lengths = buffer.reservation.run_lengths
            runs = align_to_reservation(range(buffer.num_blocks), 0, lengths)
            await channels.put(buffer.reservation, runs)
        finally:
            await channels.close()

    async def read(self, plan: QueryPlan) -> memoryview:
        """Returns the blocks of a prefix themselves, for programs that compute attention.

        An addition to Figure 5. A holder without room for the whole prefix lends, and this returns,
        only its beginning. In a model with windows or states the blocks come in the order of a
        handoff: by index, then group, those that the next query sees; then the state.

        Raises:
            RefusedError, LostError: as `init_query`.
        """
        async with self._leased(plan) as message:
            into = memoryview(bytearray(message.num_leased * self.layout.block_bytes))
            await self._reader.get(lease_of(message), [BlockRun(0, message.num_leased)], [into])
            return into

    async def found(self, hashes: Sequence[BlockHash], timeout_s: float = CALL_S) -> bool:
        """Waits until some worker is known to hold a whole prefix; False after `timeout_s`."""
        end = asyncio.get_running_loop().time() + timeout_s
        while True:
            if self.get_prefix_tree().hit_rate(hashes) == 1:
                return True
            if asyncio.get_running_loop().time() >= end:
                return False
            await asyncio.sleep(LOOK_S)

    @asynccontextmanager
    async def _leased(self, plan: QueryPlan) -> AsyncIterator[pb.ReadLease]:
        holder = plan.holder
        request = pb.LeaseBlocksRequest(
            incarnation=holder.incarnation,
            reader_worker_id=self._identity.worker_id,
            layout=kv_layout_to_proto(self.layout),
            block_hashes=join_hashes(plan.hashes),
        )
        message = await self._client.lease(holder.control_endpoint, request, CALL_S)
        try:
            yield message
        finally:
            end = pb.ReleaseBlocksRequest(
                incarnation=message.incarnation,
                lease_id=message.lease_id,
                capability=message.capability,
            )
            await self._client.release(holder.control_endpoint, end, CALL_S)

    async def close(self) -> None:
        """Ends all connections to workers."""
        await asyncio.to_thread(self._asker.close)
        await self._reader.close()
        await self._client.close()


@asynccontextmanager
async def open_pool(
    kvmanager: str,
    schedulers: Sequence[str],
    model: str,
    access: MeshAccess = NO_ACCESS,
    timeout_s: float = 10.0,
) -> AsyncIterator[Pool]:
    """Opens the pool of one model's workers and follows its changes.

    Args:
        kvmanager: `host:port`; tracks the workers' blocks.
        schedulers: `host:port` of each; track the workers.
        model: name under which it is served.
        access: the mesh's secret and certificates.
        timeout_s: limit until both have answered and the model has a worker.

    Raises:
        LostError: the limit is over.
    """
    fleet = FleetWatch(schedulers, access, "pool-client")
    feed = PrefixFeed(kvmanager, SystemClock(), access)
    changed = asyncio.Event()

    def note(workers: tuple[FleetWorker, ...]) -> None:
        for each in workers:
            feed.note_life(each.info.worker_id, each.info.incarnation)
        changed.set()

    fleet.on_change(note)
    tasks = [asyncio.create_task(fleet.run()), asyncio.create_task(feed.run())]
    try:
        worker = await _first_worker(fleet, feed, model, changed, timeout_s)
        pool = Pool(model, worker.layout, fleet, feed, access)
        try:
            yield pool
        finally:
            await pool.close()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first_worker(
    fleet: FleetWatch, feed: PrefixFeed, model: str, changed: asyncio.Event, timeout_s: float
) -> WorkerInfo:
    """Waits until both services have answered and the model has a worker."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                here = [each.info for each in fleet.workers if each.info.model == model]
                readable = [each for each in here if each.publishes]
                if readable and feed.known:
                    return readable[0]
                changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), LOOK_S)
    what = "the kvmanager has not answered" if fleet.workers else "no scheduler has answered"
    if fleet.workers and not any(each.info.model == model for each in fleet.workers):
        what = f"no worker serves {model}"
    raise LostError(f"no pool within {timeout_s:g} s: {what}")
