"""A Redis connection pool that runs our scripts and speaks our errors.

Tests: tests/contract/test_metadata_store.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hiredis
import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from kvmesh.core.config import option, positive, secret
from kvmesh.core.errors import ConfigError
from kvmesh.core.text_files import UNREADABLE, why_unreadable
from kvmesh.metadata.redis_line import RedisLines, script_name
from kvmesh.metadata.store import StoreUnavailableError

Argument = bytes | str | int

MAX_CONNECTIONS = 64
"""Callers keep fewer calls than this in flight; one more waits for `timeout_s`."""


def milliseconds(seconds: float) -> int:
    """A time to live as scripts take it: whole, and not 0, which Redis refuses."""
    return max(1, round(seconds * 1000))


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """Where Redis is."""

    url: str = option("redis://127.0.0.1:6379/0", "redis://, rediss:// (TLS) or unix:// URL")
    password: str = secret("password, if it is not part of the URL")
    key_prefix: str = option("kvmesh:", "start of all keys; two meshes in one Redis need two")
    timeout_s: float = positive(0.5, "a call that takes longer has failed")
    password_file: str = option("", "file that holds the password")


def _password(config: RedisConfig) -> str:
    """The configured password; empty without one."""
    if not config.password_file:
        return config.password
    try:
        return Path(config.password_file).read_text(encoding="utf-8").strip()
    except UNREADABLE as error:
        raise ConfigError(
            f"redis.password_file {config.password_file}: {why_unreadable(error)}"
        ) from error


class RedisClient:
    """Runs scripts; one per process.

    Raises:
        ConfigError: the URL cannot be parsed, or the password's file cannot be read. Whether Redis
            is there shows at the first call.
    """

    def __init__(self, config: RedisConfig) -> None:
        self.prefix = config.key_prefix
        password = _password(config)
        try:
            # No retries here: the caller's breaker decides when to ask again.
            pool = redis.BlockingConnectionPool.from_url(
                config.url,
                max_connections=MAX_CONNECTIONS,
                timeout=config.timeout_s,
                socket_timeout=config.timeout_s,
                socket_connect_timeout=config.timeout_s,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                **({"password": password} if password else {}),
            )
        except ValueError as error:
            raise ConfigError(f"redis.url: {error}") from error
        self._redis = redis.Redis(connection_pool=pool)
        self._pool = pool
        self._lines = RedisLines(config.url, password, config.timeout_s)
        self._names: dict[str, str] = {}
        self._timeout_s = config.timeout_s

    async def run(self, script: str, *arguments: Argument) -> Any:
        """Runs a script with the key prefix and `arguments` as ARGV.

        Raises:
            StoreUnavailableError: Redis cannot be reached, is too slow, or refused.
        """
        try:
            return await self._redis.register_script(script)(args=[self.prefix, *arguments])
        except NoScriptError as error:
            raise StoreUnavailableError("Redis lost the script while it ran") from error
        except (RedisError, OSError) as error:
            raise StoreUnavailableError(f"{type(error).__name__}: {error}") from error

    async def ask(self, script: str, *arguments: Argument) -> Any:
        """As `run`, for scripts that every request needs: all on one connection, one after another.

        Raises:
            StoreUnavailableError: Redis cannot be reached, or refused.
        """
        if not self._lines.can_open:
            return await self.run(script, *arguments)
        name = self._names.get(script)
        if name is None:
            name = self._names[script] = script_name(script)
        line = await self._lines.line()
        reply = await line.ask("EVALSHA", name, 0, self.prefix, *arguments)
        if not isinstance(reply, hiredis.ReplyError):
            return reply
        if str(reply).startswith("NOSCRIPT"):
            return await self.run(script, *arguments)  # which loads it
        raise StoreUnavailableError(str(reply))

    async def wait_for_entry(self, stream: str, after: str, wait_s: float) -> None:
        """Returns when a stream has an entry after `after`, or later; at the latest after `wait_s`
        or half the time that a call may take.

        Raises:
            StoreUnavailableError: Redis cannot be reached, or refused.
        """
        longest_s = min(wait_s, self._timeout_s / 2)
        try:
            await self._redis.xread(
                {self.prefix + stream: after}, count=1, block=milliseconds(longest_s)
            )
        except (RedisError, OSError) as error:
            raise StoreUnavailableError(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Closes all connections. May be called again."""
        self._lines.close()
        await self._redis.aclose()
        await self._pool.aclose()
