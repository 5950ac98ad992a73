"""State of the pool that kvmanagers share: their counts of reads, pending orders, and one lease.

All of it is short-lived: it expires by itself, and losing it costs a plan or an order.
Tests: tests/contract/test_pool_store.py runs against both implementations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvmesh.core.clock import Clock
from kvmesh.core.types import WorkerId
from kvmesh.metadata import pool_scripts as scripts
from kvmesh.metadata.memory_store import MemoryFleetStore
from kvmesh.metadata.redis_answers import strings_of, understanding
from kvmesh.metadata.redis_client import RedisClient, milliseconds
from kvmesh.metadata.redis_fleet import RedisFleetStore

LEASE = "pool"


class PoolStore(Protocol):
    """Shared by all kvmanagers. Every method raises StoreUnavailableError."""

    async def put_knowledge(self, replica: str, knowledge: bytes, ttl_s: float) -> None:
        """Replaces a replica's knowledge of reads; `knowledge` is the caller's encoding."""
        ...

    async def all_knowledge(self) -> list[bytes]:
        """Returns the knowledge of all replicas that has not expired."""
        ...

    async def put_orders(self, worker_id: WorkerId, orders: Sequence[bytes], ttl_s: float) -> None:
        """Adds orders for a worker; all that it has not taken expire in `ttl_s` seconds."""
        ...

    async def take_orders(self, worker_ids: Sequence[WorkerId]) -> dict[WorkerId, list[bytes]]:
        """Removes and returns the orders of these workers, oldest first."""
        ...

    async def may_plan(self, replica: str, ttl_s: float) -> bool:
        """Takes or renews the lease to plan; False while another replica holds it."""
        ...

    async def end_plan(self, replica: str) -> None:
        """Releases the lease, if the replica holds it."""
        ...


class MemoryPoolStore:
    """A `PoolStore` in this process's memory, for one replica."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._leases = MemoryFleetStore(clock)
        self._knowledge: dict[str, tuple[bytes, float]] = {}
        self._orders: dict[WorkerId, tuple[list[bytes], float]] = {}

    async def put_knowledge(self, replica: str, knowledge: bytes, ttl_s: float) -> None:
        """See `PoolStore.put_knowledge`."""
        self._knowledge[replica] = (knowledge, self._clock.now() + ttl_s)

    async def all_knowledge(self) -> list[bytes]:
        """See `PoolStore.all_knowledge`."""
        now = self._clock.now()
        self._knowledge = {key: kept for key, kept in self._knowledge.items() if now < kept[1]}
        return [knowledge for knowledge, _ in self._knowledge.values()]

    async def put_orders(self, worker_id: WorkerId, orders: Sequence[bytes], ttl_s: float) -> None:
        """See `PoolStore.put_orders`."""
        now = self._clock.now()
        self._orders = {key: kept for key, kept in self._orders.items() if now < kept[1]}
        before, _ = self._orders.get(worker_id, ([], 0.0))
        self._orders[worker_id] = ([*before, *orders], now + ttl_s)

    async def take_orders(self, worker_ids: Sequence[WorkerId]) -> dict[WorkerId, list[bytes]]:
        """See `PoolStore.take_orders`."""
        now = self._clock.now()
        taken = {each: self._orders.pop(each, ([], 0.0)) for each in worker_ids}
        return {each: orders for each, (orders, end) in taken.items() if now < end}

    async def may_plan(self, replica: str, ttl_s: float) -> bool:
        """See `PoolStore.may_plan`."""
        return await self._leases.acquire_lease(LEASE, replica, ttl_s)

    async def end_plan(self, replica: str) -> None:
        """See `PoolStore.end_plan`."""
        await self._leases.release_lease(LEASE, replica)


class RedisPoolStore:
    """A `PoolStore` in Redis.

    Args:
        client: not closed by this store.
    """

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._leases = RedisFleetStore(client)

    async def put_knowledge(self, replica: str, knowledge: bytes, ttl_s: float) -> None:
        """See `PoolStore.put_knowledge`."""
        await self._client.run(scripts.PUT_KNOWLEDGE, replica, knowledge, milliseconds(ttl_s))

    async def all_knowledge(self) -> list[bytes]:
        """See `PoolStore.all_knowledge`."""
        return strings_of(await self._client.run(scripts.ALL_KNOWLEDGE))

    async def put_orders(self, worker_id: WorkerId, orders: Sequence[bytes], ttl_s: float) -> None:
        """See `PoolStore.put_orders`."""
        await self._client.run(scripts.PUT_ORDERS, worker_id, milliseconds(ttl_s), *orders)

    async def take_orders(self, worker_ids: Sequence[WorkerId]) -> dict[WorkerId, list[bytes]]:
        """See `PoolStore.take_orders`."""
        if not worker_ids:
            return {}
        found = await self._client.run(scripts.TAKE_ORDERS, *worker_ids)
        with understanding():
            pairs = zip(worker_ids, found, strict=True)
            return {worker_id: strings_of(orders) for worker_id, orders in pairs if orders}

    async def may_plan(self, replica: str, ttl_s: float) -> bool:
        """See `PoolStore.may_plan`."""
        return await self._leases.acquire_lease(LEASE, replica, ttl_s)

    async def end_plan(self, replica: str) -> None:
        """See `PoolStore.end_plan`."""
        await self._leases.release_lease(LEASE, replica)
