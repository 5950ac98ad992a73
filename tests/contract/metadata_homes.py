"""Homes of `MetadataStore` and `FleetStore`: memory, and a real Redis; tests hold the time."""

from __future__ import annotations

import uuid
from hashlib import blake2b

import redis.asyncio as redis

from kvmesh.core.clock import ManualClock
from kvmesh.core.slots import Publisher, Slot
from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.metadata.memory_store import MemoryFleetStore, MemoryMetadataStore
from kvmesh.metadata.redis_client import RedisClient, RedisConfig
from kvmesh.metadata.redis_fleet import RedisFleetStore
from kvmesh.metadata.redis_store import RedisMetadataStore

LEASE_S = 30.0
NAMESPACE = "model-a"
EVERYTHING = 1_000_000


def block(number: int) -> BlockHash:
    return BlockHash(blake2b(str(number).encode(), digest_size=16).digest())


def blocks(*numbers: int) -> bytes:
    return b"".join(block(number) for number in numbers)


def publisher(worker: str, incarnation: int = 1, namespace: str = NAMESPACE) -> Publisher:
    return Publisher(WorkerId(worker), incarnation, "east", namespace)


class Memory:
    """The in-memory stores, with the time in hand."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryMetadataStore(self.clock, LEASE_S)
        self.fleet = MemoryFleetStore(self.clock)

    async def expire(self, slot: Slot) -> None:
        self.clock.advance(LEASE_S)

    async def pass_time(self, seconds: float, *keys: str) -> None:
        self.clock.advance(seconds)

    async def is_empty(self) -> bool:
        return self.store.is_empty

    async def close(self) -> None:
        await self.store.close()


class Redis:
    """The Redis stores under a prefix of their own; ends a TTL by moving it to the past."""

    def __init__(self, url: str) -> None:
        self.prefix = f"{{test-{uuid.uuid4().hex}}}:"
        client = RedisClient(RedisConfig(url=url, key_prefix=self.prefix, timeout_s=10.0))
        self.store = RedisMetadataStore(client, LEASE_S)
        self.fleet = RedisFleetStore(client)
        self.raw = redis.Redis.from_url(url, protocol=2)

    def lease_key(self, slot: Slot) -> str:
        return f"{self.prefix}lease:{slot}"

    async def expire(self, slot: Slot) -> None:
        assert await self.raw.pexpireat(self.lease_key(slot), 1)

    async def pass_time(self, seconds: float, *keys: str) -> None:
        for key in keys:
            assert 0 < await self.raw.pttl(self.prefix + key) <= seconds * 1000
            assert await self.raw.pexpireat(self.prefix + key, 1)

    async def is_empty(self) -> bool:
        """But for the log, which is bounded, not emptied."""
        return {f"{self.prefix}log".encode()} >= set(await self.raw.keys(self.prefix + "*"))

    async def close(self) -> None:
        await self.raw.aclose()
        await self.store.close()


Home = Memory | Redis
