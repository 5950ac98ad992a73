"""Something at Redis' address that answers anything is a store that failed, and nothing worse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kvmesh.core.errors import LostError
from kvmesh.core.slots import Publisher, Slot
from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.metadata import scripts
from kvmesh.metadata.pool_store import RedisPoolStore
from kvmesh.metadata.quota_store import RedisQuotaStore
from kvmesh.metadata.redis_blocks import RedisBlocks
from kvmesh.metadata.redis_client import RedisClient, RedisConfig
from kvmesh.metadata.redis_fleet import RedisFleetStore
from kvmesh.metadata.redis_store import RedisMetadataStore
from kvmesh.metadata.store import StoreUnavailableError
from kvmesh.metadata.tenant_store import RedisTenantStore
from kvmesh.policy.quota import TenantLimits

ANSWERS = {
    "a number": b":7\r\n",
    "nothing": b"$-1\r\n",
    "no list": b"*-1\r\n",
    "a word": b"+applied or not\r\n",
    "bytes that are no text": b"$2\r\n\xff\xfe\r\n",
    "a list of lists": b"*2\r\n*1\r\n:1\r\n*0\r\n",
    "an odd list": b"*3\r\n$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n",
    "names that are no text": b"*2\r\n$2\r\n\xff\xfe\r\n$1\r\nx\r\n",
    "rows of the wrong kinds": b"*1\r\n*4\r\n:1\r\n$1\r\nx\r\n:2\r\n$1\r\ny\r\n",
    "an error": b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
    "no protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a string of 512 GiB that does not come": b"$549755813888\r\nabc",
    "lists in lists": b"*1\r\n" * 10_000,
}

Call = Callable[[RedisClient], Awaitable[object]]
PUBLISHER = Publisher(WorkerId("w"), 1, "c", "n")
CALLS: dict[str, Call] = {
    "register": lambda each: RedisMetadataStore(each, 1).register(PUBLISHER),
    "snapshot": lambda each: RedisMetadataStore(each, 1).begin_snapshot(PUBLISHER),
    "events": lambda each: RedisMetadataStore(each, 1).apply_events(Slot("1"), 1, bytes(16), b""),
    "match": lambda each: RedisMetadataStore(each, 1).match("n", bytes(16)),
    "sweep": lambda each: RedisMetadataStore(each, 1).sweep(10),
    "statistics": lambda each: RedisMetadataStore(each, 1).statistics(),
    "workers": lambda each: RedisFleetStore(each).list_workers(),
    "lease": lambda each: RedisFleetStore(each).acquire_lease("l", "o", 1),
    "knowledge": lambda each: RedisPoolStore(each).all_knowledge(),
    "orders": lambda each: RedisPoolStore(each).take_orders([WorkerId("w")]),
    "tenants": lambda each: RedisTenantStore(each).read(),
    "quota": lambda each: RedisQuotaStore(each, "o", 1, 1).acquire("t", TenantLimits(1, 1, 1), 1),
}


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[RedisClient]:
    """A client of something that says the same to everything."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = RedisClient(RedisConfig(f"redis://127.0.0.1:{port}", timeout_s=0.1))
    try:
        yield client
    finally:
        await client.close()
        server.close()


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_senseless_answer_is_a_store_that_failed(name: str) -> None:
    outcomes: list[str] = []
    for call in CALLS.values():
        async with answering(ANSWERS[name]) as client:
            try:
                await call(client)
                outcomes.append("read")
            except StoreUnavailableError:
                outcomes.append("failed")
    # A lease is yes or no, which any answer can be read as; a few more may look right.
    assert outcomes.count("failed") >= len(CALLS) - 5, dict(zip(CALLS, outcomes, strict=True))


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_senseless_store_of_kv_has_no_block_or_has_failed(name: str) -> None:
    keys = [BlockHash(bytes([number]) * 16) for number in range(2)]
    blocks = [memoryview(bytearray(64)) for _ in keys]
    async with answering(ANSWERS[name]) as client:
        store = RedisBlocks(client, "model", 64, 10.0)
        with contextlib.suppress(LostError):
            assert not any(await store.get(keys, blocks))
        with contextlib.suppress(LostError):
            assert len(await store.has(keys)) == len(keys)
        with contextlib.suppress(LostError):
            await store.put(keys, blocks)


class _Sweeping:
    """A client of a store that has a dead slot and says the same of every sweep."""

    def __init__(self, answer: list[int]) -> None:
        self._answer = answer
        self.num_calls = 0

    async def run(self, script: str, *_: object) -> object:
        self.num_calls += 1
        assert self.num_calls < 100, "a sweep without end"
        return [b"1"] if script == scripts.DEAD_SLOTS else self._answer


@pytest.mark.parametrize("answer", [[0, 0], [-1, 0], [-1, 1], [11, 0], [11, 1]])
async def test_a_sweep_that_does_nothing_or_too_much_is_a_store_that_failed(
    answer: list[int],
) -> None:
    client: Any = _Sweeping(answer)
    with pytest.raises(StoreUnavailableError, match="invalid answer"):
        await RedisMetadataStore(client, 1).sweep(10)
    assert client.num_calls == 2


async def test_a_sweep_ends_with_its_slots_and_its_blocks() -> None:
    client: Any = _Sweeping([0, 1])
    assert await RedisMetadataStore(client, 1).sweep(10) == 0
    client = _Sweeping([3, 0])
    with pytest.raises(StoreUnavailableError):  # the last time one may go, and three do
        await RedisMetadataStore(client, 1).sweep(10)
    client = _Sweeping([1, 0])
    assert await RedisMetadataStore(client, 1).sweep(10) == 10
