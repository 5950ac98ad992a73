"""KV blocks in Redis or Valkey: an `OutsideStore` (`engine/outside_cache.py`).

A block's key names checkpoint, layout and the block: the hash of all tokens up to its end, chained
from the root of model, tenant's salt and adapter (`kv/hashing.py`). So no request finds blocks of
another tenant or model, and there is no list to search. The value is a checksum, then the block.
Reading renews its time to live. Tests: tests/integration/test_outside_store.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

import crc32c

from kvmesh.core.errors import LostError
from kvmesh.core.types import BlockHash
from kvmesh.metadata.redis_answers import strings_of
from kvmesh.metadata.redis_client import RedisClient, milliseconds
from kvmesh.metadata.redis_library import redis
from kvmesh.metadata.store import StoreUnavailableError

_SUM = struct.Struct("<I")

# A call per key would cost more than the keys.
_HAS = """
local found = {}
for i = 2, #ARGV do found[i - 1] = redis.call('EXISTS', ARGV[1] .. ARGV[i]) end
return found
"""


class RedisBlocks:
    """Blocks of one checkpoint and layout.

    Args:
        identity: properties that all readers of a block share: checkpoint, shape, block kinds.
        ttl_s: seconds for which a block is kept after its last use.
    """

    def __init__(self, client: RedisClient, identity: str, block_bytes: int, ttl_s: float) -> None:
        self._client = client
        self._block_bytes = block_bytes
        self._ttl_ms = milliseconds(ttl_s)
        digest = hashlib.sha256(f"{identity} {block_bytes}".encode()).hexdigest()[:32]
        self._place = f"kv:{digest}:"

    async def has(self, keys: Sequence[BlockHash]) -> list[bool]:
        """See `OutsideStore.has`."""
        if not keys:
            return []
        with _as_lost():
            found = await self._client.run(_HAS, *(self._place + key.hex() for key in keys))
            return [bool(each) for each in _as_many(found, len(keys))]

    async def get(self, keys: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        """See `OutsideStore.get`. Deletes damaged blocks."""
        names = self._names(keys)

        def read(server: redis.Redis) -> Awaitable[Any]:
            pipeline = server.pipeline(transaction=False)
            for name in names:
                # Not more than a block and one byte, whatever is stored there.
                pipeline.getrange(name, 0, _SUM.size + self._block_bytes)
                pipeline.pexpire(name, self._ttl_ms)
            return pipeline.execute()

        with _as_lost():
            answer = _as_many(await self._client.call(read), 2 * len(names))
            values = strings_of(answer[::2])
        good = [self._is_whole(value) for value in values]
        for value, target, is_good in zip(values, into, good, strict=True):
            if is_good:
                target[:] = memoryview(value)[_SUM.size :]
        bad = [
            name for name, value, ok in zip(names, values, good, strict=True) if value and not ok
        ]
        if bad:
            with _as_lost():
                await self._client.call(lambda server: server.unlink(*bad))
        return good

    def _is_whole(self, value: bytes) -> bool:
        if len(value) != _SUM.size + self._block_bytes:
            return False
        view = memoryview(value)
        return bool(_SUM.unpack(view[: _SUM.size])[0] == crc32c.crc32c(view[_SUM.size :]))

    async def put(self, keys: Sequence[BlockHash], blocks: Sequence[memoryview]) -> None:
        """See `OutsideStore.put`."""
        names = self._names(keys)

        def write(server: redis.Redis) -> Awaitable[Any]:
            pipeline = server.pipeline(transaction=False)
            for name, block in zip(names, blocks, strict=True):
                value = b"".join((_SUM.pack(crc32c.crc32c(block)), block))
                pipeline.set(name, value, px=self._ttl_ms)
            return pipeline.execute()

        with _as_lost():
            await self._client.call(write)

    async def close(self) -> None:
        """See `OutsideStore.close`."""
        await self._client.close()

    def _names(self, keys: Sequence[BlockHash]) -> list[str]:
        return [f"{self._client.prefix}{self._place}{key.hex()}" for key in keys]


@contextlib.contextmanager
def _as_lost() -> Iterator[None]:
    try:
        yield
    except StoreUnavailableError as error:
        raise LostError(str(error)) from error


def _as_many(answer: Any, count: int) -> list[Any]:
    if not isinstance(answer, list) or len(answer) != count:
        raise StoreUnavailableError(f"Redis did not answer with {count} values")
    return answer
