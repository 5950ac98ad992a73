"""A Redis connection pool that runs our scripts and speaks our errors.

Tests: tests/contract/test_metadata_store.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import hiredis

from kvmesh.core.config import option, positive, secret
from kvmesh.core.errors import ConfigError
from kvmesh.core.text_files import UNREADABLE, why_unreadable
from kvmesh.metadata.redis_cluster import cluster_addresses
from kvmesh.metadata.redis_library import (
    MovedError,
    NoBackoff,
    NoScriptError,
    RedisError,
    Retry,
    redis,
)
from kvmesh.metadata.redis_line import RedisLines, script_name
from kvmesh.metadata.redis_sentinel import RedisMasters, names_sentinels
from kvmesh.metadata.store import StoreUnavailableError

Argument = bytes | str | int

MAX_CONNECTIONS = 64
"""Maximum number of connections; a call beyond it waits for one, at most `timeout_s` seconds."""


LONGEST_WAIT_S = 1.0
"""Maximum seconds of one wait for an entry of a stream, so that a loss of Redis's data is noticed
soon."""


def milliseconds(seconds: float) -> int:
    """Returns a time to live in whole milliseconds, at least 1, because Redis refuses 0."""
    return max(1, round(seconds * 1000))


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """Address and credentials of Redis."""

    url: str = option(
        "redis://127.0.0.1:6379/0", "redis://, rediss:// (TLS), unix:// or redis+sentinel:// URL"
    )
    password: str = secret("Redis password, if the URL does not contain it")
    key_prefix: str = option(
        "kvmesh:", "prefix of all keys; two meshes in one Redis need different prefixes"
    )
    timeout_s: float = positive(0.5, "timeout of one call, in seconds")
    password_file: str = option("", "file with the Redis password")


def _password(config: RedisConfig) -> str:
    """Returns the configured password; empty if there is none."""
    if not config.password_file:
        return config.password
    try:
        return Path(config.password_file).read_text(encoding="utf-8").strip()
    except UNREADABLE as error:
        raise ConfigError(
            f"redis.password_file {config.password_file}: {why_unreadable(error)}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Node:
    """Connections to one Redis server.

    Attributes:
        client: connection pool for calls.
        patient: connection pool for waits for a stream's entry.
        lines: pipelined connection for frequent scripts.
    """

    client: redis.Redis
    patient: redis.Redis
    lines: RedisLines


def tagged(prefix: str) -> str:
    """Returns a key prefix with a hash tag, which keeps all keys on one node of a Redis Cluster."""
    return prefix if "{" in prefix else f"{{{prefix}}}"


class RedisClient:
    """Runs scripts; one per process. In a Redis Cluster it finds the node that has its keys, also
    when the node of the URL is lost. Behind sentinels it finds the server that is the master. It
    searches again after each failure.

    Raises:
        ConfigError: the URL cannot be parsed, or the password's file cannot be read. An unreachable
            Redis fails only at the first call.
    """

    def __init__(self, config: RedisConfig) -> None:
        self.prefix = tagged(config.key_prefix)
        self._config = config
        self._password = _password(config)
        self._names: dict[str, str] = {}
        self._nodes: dict[str, _Node] = {}
        self._masters: RedisMasters | None = None
        self._search: asyncio.Task[_Node] | None = None
        self._first: _Node | None = None
        self._others: deque[str] = deque()
        self._has_others = False
        if names_sentinels(config.url):
            self._masters = RedisMasters(config.url, self._password, config.timeout_s)
        else:
            self._first = self._at(config.url)
        self._node = self._first

    def _at(self, url: str) -> _Node:
        """Connections to a server: those that were left come into use again."""
        if url not in self._nodes:
            self._nodes[url] = self._open(url)
        return self._nodes[url]

    async def _current(self) -> _Node:
        """The node that is asked; all who wait for a search wait for the same one.

        Raises:
            StoreUnavailableError: no sentinel knows it.
        """
        if self._node is not None:
            if not self._has_others and self._masters is None:
                await self._learn(self._node)
            return self._node
        if self._search is None:
            self._search = asyncio.create_task(self._find(), name="find the master")
        return await asyncio.shield(self._search)

    async def _learn(self, node: _Node) -> None:
        """Learns the nodes of a cluster: if one is lost, others know where the keys are."""
        self._has_others = True
        try:
            addresses = await cluster_addresses(node.client)
        except (RedisError, OSError):
            self._has_others = False  # the call that comes next tells why
            return
        self._others = deque(self._url_of(*each) for each in addresses)

    async def _find(self) -> _Node:
        assert self._masters is not None, "only sentinels have nothing to begin with"
        try:
            self._node = self._at(await self._masters.url())
            return self._node
        finally:
            self._search = None

    def _open(self, url: str) -> _Node:
        config, password = self._config, self._password
        try:
            client, patient = (
                self._connections(url, longest_s)
                for longest_s in (config.timeout_s, config.timeout_s + LONGEST_WAIT_S)
            )
        except ValueError as error:
            raise ConfigError(f"redis.url: {error}") from error
        lines = RedisLines(url, password, config.timeout_s)
        return _Node(client, patient, lines)

    def _connections(self, url: str, longest_s: float) -> redis.Redis:
        """Returns a connection pool whose answers may take `longest_s` seconds."""
        # No retries here: the caller's circuit breaker decides when to retry.
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=self._config.timeout_s,
            socket_timeout=longest_s,
            socket_connect_timeout=self._config.timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **({"password": self._password} if self._password else {}),
        )
        return redis.Redis.from_pool(pool)

    async def run(self, script: str, *arguments: Argument) -> Any:
        """Runs a script with the key prefix and `arguments` as ARGV.

        Raises:
            StoreUnavailableError: Redis cannot be reached, is too slow, or refused.
        """
        words = [self.prefix, *arguments]
        return await self._call(
            lambda node: node.client.register_script(script)(keys=[self.prefix], args=words)
        )

    async def ask(self, script: str, *arguments: Argument) -> Any:
        """Runs a script that every request needs, pipelined on one connection; see `run`.

        Raises:
            StoreUnavailableError: Redis cannot be reached, is too slow, or refused.
        """
        node = await self._current()
        if not node.lines.can_open:
            return await self.run(script, *arguments)
        name = self._names.get(script)
        if name is None:
            name = self._names[script] = script_name(script)
        try:
            line = await node.lines.line()
            async with asyncio.timeout(self._config.timeout_s):
                reply = await line.ask("EVALSHA", name, 1, self.prefix, self.prefix, *arguments)
        except TimeoutError as error:
            self._go_back(node)
            raise StoreUnavailableError("Redis did not answer in time") from error
        except StoreUnavailableError:
            self._go_back(node)
            raise
        if not isinstance(reply, hiredis.ReplyError):
            return reply
        if str(reply).startswith(("NOSCRIPT", "MOVED")):
            return await self.run(script, *arguments)  # which loads the script, or follows the move
        self._go_back(node)  # it may be the replica now
        raise StoreUnavailableError(str(reply))

    async def wait_for_entry(self, stream: str, after: str, wait_s: float) -> None:
        """Waits until a stream has an entry after `after`, for `wait_s` or `LONGEST_WAIT_S` at
        most.

        Raises:
            StoreUnavailableError: Redis cannot be reached, or refused.
        """
        block = milliseconds(min(wait_s, LONGEST_WAIT_S))
        key = self.prefix + stream
        await self._call(lambda node: node.patient.xread({key: after}, count=1, block=block))

    async def call(self, call: Callable[[redis.Redis], Awaitable[Any]]) -> Any:
        """Calls Redis without a script; all keys begin with `prefix`.

        Args:
            call: called again with another server if the keys moved there.

        Raises:
            StoreUnavailableError: Redis cannot be reached, is too slow, or refused.
        """
        return await self._call(lambda node: call(node.client))

    async def _call(self, call: Callable[[_Node], Awaitable[Any]]) -> Any:
        """Calls the node that has our keys; in a cluster another node may redirect to it."""
        node = await self._current()
        try:
            try:
                return await call(node)
            except MovedError as moved:
                node = self._go_to(node, moved.host, moved.port)
                return await call(node)
        except NoScriptError as error:
            raise StoreUnavailableError("Redis lost the script while it ran") from error
        except (RedisError, OSError) as error:
            self._go_back(node)
            raise StoreUnavailableError(f"{type(error).__name__}: {error}") from error

    def _go_to(self, node: _Node, host: str, port: int) -> _Node:
        if node is self._node or self._node is None:  # no other call has switched it meanwhile
            self._leave(node)
            self._node = self._at(self._url_of(host, port))
            self._has_others = False  # the cluster has changed
        return self._node

    def _url_of(self, host: str, port: int) -> str:
        where = urlsplit(self._config.url)
        login, at, _ = where.netloc.rpartition("@")
        host = host or str(where.hostname)  # empty if the node does not know its own address
        netloc = f"{login}{at}[{host}]:{port}" if ":" in host else f"{login}{at}{host}:{port}"
        return urlunsplit(where._replace(netloc=netloc))

    def _go_back(self, node: _Node) -> None:
        """Returns to the first node after an error, or to none: the keys may have moved, and the
        first node or a sentinel knows where. After an error of the first node, another one of its
        cluster is the first.
        """
        if node is not self._node:
            return
        if node is not self._first:
            self._leave(node)
        elif self._others:
            self._first = self._at(self._others[0])
            self._others.rotate(-1)
            self._leave(node)
        self._node = self._first

    def _leave(self, node: _Node) -> None:
        if node is not self._first:
            node.lines.close()

    async def close(self) -> None:
        """Closes all connections. May be called again."""
        if self._search is not None:
            self._search.cancel()
        for node in self._nodes.values():
            node.lines.close()
            await node.client.aclose()
            await node.patient.aclose()
