"""Stores of the tenant directory: a file, or Redis. Both replace it atomically.

Tests: tests/contract/test_tenant_store.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvmesh.metadata.redis_answers import bytes_of
from kvmesh.metadata.store import StoreUnavailableError

if TYPE_CHECKING:
    from kvmesh.metadata.redis_client import RedisClient

_READ = "return redis.call('GET', ARGV[1] .. 'tenants') or ''"
_REPLACE = """
local key = ARGV[1] .. 'tenants'
if (redis.call('GET', key) or '') ~= ARGV[2] then return 0 end
redis.call('SET', key, ARGV[3])
return 1
"""


class TenantStore(Protocol):
    """A document that is read often and replaced seldom. Raises StoreUnavailableError."""

    async def read(self) -> bytes:
        """Returns the document; empty if there is none."""
        ...

    async def replace(self, old: bytes, new: bytes) -> bool:
        """Replaces the document if it is still `old`."""
        ...

    async def close(self) -> None:
        """Closes connections. May be called again."""
        ...


class FileTenantStore:
    """The directory in a file that only its owner may read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self) -> bytes:
        """See `TenantStore.read`."""
        return await asyncio.to_thread(self._read)

    async def replace(self, old: bytes, new: bytes) -> bool:
        """See `TenantStore.replace`."""
        return await asyncio.to_thread(self._replace, old, new)

    async def close(self) -> None:
        """See `TenantStore.close`."""

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise StoreUnavailableError(f"{self._path}: {error.strerror}") from error

    def _replace(self, old: bytes, new: bytes) -> bool:
        try:
            with self._path.with_name(self._path.name + ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if self._read() != old:
                    return False
                # Created with mode 0600. A reader sees the old file or the new one, never a part.
                handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
                try:
                    with os.fdopen(handle, "wb") as file:
                        file.write(new)
                        file.flush()
                        os.fsync(file.fileno())
                    Path(name).replace(self._path)
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        Path(name).unlink()
        except OSError as error:
            raise StoreUnavailableError(f"{self._path}: {error.strerror}") from error
        return True


class RedisTenantStore:
    """The directory in Redis, for gateways on several hosts.

    Args:
        client: closed with the store.
    """

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def read(self) -> bytes:
        """See `TenantStore.read`."""
        return bytes_of(await self._client.run(_READ))

    async def replace(self, old: bytes, new: bytes) -> bool:
        """See `TenantStore.replace`."""
        return bool(await self._client.run(_REPLACE, old, new))

    async def close(self) -> None:
        """See `TenantStore.close`."""
        await self._client.close()
