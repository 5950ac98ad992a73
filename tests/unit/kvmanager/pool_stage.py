"""Kvmanagers over stores in memory and the workers that are connected to them; windows are ended by
hand.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.core.clock import ManualClock
from kvmesh.core.pool import OldBlocks, PoolOrder, PoolReport
from kvmesh.core.slots import Publisher
from kvmesh.core.types import Endpoint, Role, WorkerId
from kvmesh.kv.hashing import split_hashes
from kvmesh.metadata.memory_store import MemoryMetadataStore
from kvmesh.metadata.pool_store import MemoryPoolStore
from kvmesh.metadata.store import StoreUnavailableError
from kvmesh.rpc.convert_pool import (
    oldest_to_proto,
    pool_order_from_proto,
    pool_report_to_proto,
)
from kvmesh.rpc.outbox import Outbox
from kvmesh.v1 import kv_manager_service_pb2 as pb
from kvmesh.v1 import pool_types_pb2
from services.kvmanager.config import PoolConfig
from services.kvmanager.guard import StoreGuard
from services.kvmanager.pool import Pool
from services.kvmanager.pool_seat import PoolSeat
from tests.unit.policy.test_heat import SIZE, prefix

CONFIG = PoolConfig(
    budget_mb_s=1.0, window_s=10.0, min_reads=2.0, segment_blocks=SIZE, max_segments=100
)
BLOCK_BYTES = 1000

A, B = WorkerId("a"), WorkerId("b")


class FaultyPoolStore(MemoryPoolStore):
    """Refuses to take knowledge when told to."""

    fails = False

    async def put_knowledge(self, replica: str, knowledge: bytes, ttl_s: float) -> None:
        if self.fails:
            raise StoreUnavailableError("told to")
        await super().put_knowledge(replica, knowledge, ttl_s)


class Stage:
    """Stores that replicas share, and workers that are connected to one of them each."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryMetadataStore(self.clock, 1e9)
        self.shared = FaultyPoolStore(self.clock)
        self.guard = StoreGuard(self.store, 0.0, self._recovered)
        self._outboxes: dict[WorkerId, Outbox[pb.PublishResponse]] = {}
        self._read: dict[WorkerId, int] = {}
        self._roles: dict[WorkerId, Role] = {}
        self._scenarios: dict[WorkerId, str] = {}

    async def _recovered(self) -> None:
        """No sessions here."""

    def replica(self, label: str, config: PoolConfig = CONFIG) -> Pool:
        return Pool(config, self.shared, self.guard, self.clock, label)

    async def worker(
        self,
        pool: Pool,
        worker_id: WorkerId,
        *held: str,
        role: Role = Role.HYBRID,
        scenario: str = "",
    ) -> PoolSeat:
        """A worker that holds the prefixes of these paths."""
        self._roles[worker_id], self._scenarios[worker_id] = role, scenario
        publisher = Publisher(worker_id, 1, "east", "m")
        slot = (await self.store.register(publisher)).slot
        for number, path in enumerate(held):
            await self.store.apply_events(slot, number + 1, prefix(path), b"")
        outbox = self._outboxes[worker_id] = Outbox()
        seat = PoolSeat(publisher, outbox)
        pool.join(seat)
        self.report(seat, 0)
        return seat

    def report(self, seat: PoolSeat, more: int, room: int = 1000) -> None:
        """The worker read so many blocks more."""
        who = seat.publisher.worker_id
        self._read[who] = self._read.get(who, 100) + more
        role, read = self._roles[who], self._read[who]
        scenario = self._scenarios[who]
        report = PoolReport(role, Endpoint(who, 1), BLOCK_BYTES, room, read, scenario=scenario)
        assert seat.handle(pb.PublishRequest(pool=pool_report_to_proto(report)))

    def tell_oldest(self, seat: PoolSeat, path: str) -> None:
        """The end of this prefix leaves the worker's pool next."""
        hashes = tuple(reversed(split_hashes(prefix(path))))
        tiers = oldest_to_proto([OldBlocks("pool", hashes)])
        message = pool_types_pb2.OldestBlocks(tiers=tiers)
        assert seat.handle(pb.PublishRequest(oldest=message))

    async def orders(self, pool: Pool, worker_id: WorkerId) -> Sequence[PoolOrder | None]:
        """What the worker is told; nothing can be told after it."""
        await pool._hand_out()
        self._outboxes[worker_id].close()
        return [pool_order_from_proto(m.order) async for m in self._outboxes[worker_id]]

    async def window(self, *pools: Pool) -> None:
        for pool in pools:
            await pool.heat.count()
            await pool.end_window()
        self.clock.advance(CONFIG.window_s)
