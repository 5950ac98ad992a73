"""The scheduler's durable state in Redis: workers with a time to live, groups, and leases.

Tests: tests/contract/test_metadata_store.py.
"""

from __future__ import annotations

from kvmesh.core.types import WorkerId
from kvmesh.metadata import scripts
from kvmesh.metadata.redis_answers import bytes_of, strings_of, understanding
from kvmesh.metadata.redis_client import RedisClient, milliseconds


class RedisFleetStore:
    """A `FleetStore` in Redis.

    Args:
        client: closed with the store.
    """

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def put_worker(self, worker_id: WorkerId, info: bytes, ttl_s: float) -> None:
        """See `FleetStore.put_worker`."""
        await self._client.run(scripts.PUT_WORKER, worker_id, info, milliseconds(ttl_s))

    async def list_workers(self) -> dict[WorkerId, bytes]:
        """See `FleetStore.list_workers`."""
        found = strings_of(await self._client.run(scripts.LIST_WORKERS))
        with understanding():
            pairs = zip(found[::2], found[1::2], strict=True)
            return {WorkerId(worker.decode()): info for worker, info in pairs}

    async def remove_worker(self, worker_id: WorkerId) -> None:
        """See `FleetStore.remove_worker`."""
        await self._client.run(scripts.REMOVE_WORKER, worker_id)

    async def put_group(self, scenario: str, wish: bytes) -> None:
        """See `FleetStore.put_group`."""
        await self._client.run(scripts.PUT_GROUP, scenario, wish)

    async def list_groups(self) -> dict[str, bytes]:
        """See `FleetStore.list_groups`."""
        found = strings_of(await self._client.run(scripts.LIST_GROUPS))
        with understanding():
            pairs = zip(found[::2], found[1::2], strict=True)
            return {scenario.decode(): wish for scenario, wish in pairs}

    async def remove_group(self, scenario: str) -> None:
        """See `FleetStore.remove_group`."""
        await self._client.run(scripts.REMOVE_GROUP, scenario)

    async def put_adapters(self, wishes: bytes) -> None:
        """See `FleetStore.put_adapters`."""
        await self._client.run(scripts.PUT_ADAPTERS, wishes)

    async def adapters(self) -> bytes:
        """See `FleetStore.adapters`."""
        return bytes_of(await self._client.run(scripts.ADAPTERS))

    async def acquire_lease(self, name: str, owner: str, ttl_s: float) -> bool:
        """See `FleetStore.acquire_lease`."""
        held = await self._client.run(scripts.HOLD_LEASE, name, owner, milliseconds(ttl_s))
        return bool(held)

    async def release_lease(self, name: str, owner: str) -> None:
        """See `FleetStore.release_lease`."""
        await self._client.run(scripts.RELEASE_LEASE, name, owner)

    async def close(self) -> None:
        """See `FleetStore.close`."""
        await self._client.close()
