"""One pipelined Redis connection for scripts that every request needs.

A pool gives each call its own connection with checks, which costs 250 us of CPU time. This pipeline
sends all pending commands together and reads the answers in order, for a tenth of that.
Tests: tests/integration/test_redis_line.py, tests/contract/test_metadata_store.py.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import hiredis

from kvmesh.metadata.redis_library import parse_url
from kvmesh.metadata.store import StoreUnavailableError

Argument = bytes | str | int

_pack = cast("Callable[[tuple[Argument, ...]], bytes]", hiredis.pack_command)
"""Cast, because hiredis declares a tuple of one element."""


class RedisLine(asyncio.Protocol):
    """A connection that ends for good at the first error.

    Attributes:
        is_open: whether it accepts commands.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._reader = hiredis.Reader()
        # A caller that gave up keeps its place in the queue, because its answer still arrives.
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._progress_at = 0.0

    def is_stuck(self, longest_s: float) -> bool:
        """Whether it owes an answer and received nothing for `longest_s` seconds."""
        now = asyncio.get_running_loop().time()
        return bool(self._waiting) and now - self._progress_at > longest_s

    @property
    def num_waiting(self) -> int:
        """Number of commands without an answer."""
        return len(self._waiting)

    async def ask(self, *words: Argument) -> Any:
        """Sends a command and returns its answer, which may be an error reply.

        Raises:
            StoreUnavailableError: the connection ended first.
        """
        if self._transport is None:
            raise StoreUnavailableError("the connection to Redis is closed")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        if not self._waiting:
            self._progress_at = loop.time()
        self._waiting.append(answer)
        self._transport.write(_pack(words))
        return await answer

    def close(self) -> None:
        """Closes the connection. May be called again."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        # uvloop's transport is no subclass, but has the methods that are needed.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._progress_at = asyncio.get_running_loop().time()
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                answer = self._waiting.popleft()
                if not answer.done():
                    answer.set_result(reply)
        except (hiredis.ProtocolError, IndexError):
            self.close()  # no answer in Redis's protocol, or one too many

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.is_open = False
        self._transport = None
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                why = str(error) if error is not None else "closed by Redis"
                answer.set_exception(StoreUnavailableError(f"the connection broke: {why}"))


class RedisLines:
    """Opens lines to one Redis, one at a time.

    Args:
        url: only redis:// URLs are supported.
        password: password, if it is not part of the URL.
        timeout_s: maximum seconds to open a line, or for a line to owe an answer.
    """

    def __init__(self, url: str, password: str, timeout_s: float) -> None:
        where = parse_url(url)
        self.can_open = url.startswith("redis://") and "host" in where
        self._host = str(where.get("host", ""))
        self._port = int(where.get("port", 6379))
        self._login = _login(where.get("username"), where.get("password") or password)
        self._database = int(where.get("db", 0))
        self._timeout_s = timeout_s
        self._line: RedisLine | None = None
        self._opening = asyncio.Lock()

    async def line(self) -> RedisLine:
        """Returns the open line; opens one if there is none.

        Raises:
            StoreUnavailableError: Redis cannot be reached, or refuses the login.
        """
        if self._line is not None and self._line.is_open:
            if not self._line.is_stuck(self._timeout_s):
                return self._line
            self._line.close()
        async with self._opening:
            if self._line is None or not self._line.is_open:
                self._line = await self._open()
            return self._line

    def close(self) -> None:
        """Closes the line. May be called again."""
        if self._line is not None:
            self._line.close()

    async def _open(self) -> RedisLine:
        line = RedisLine()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                await loop.create_connection(lambda: line, self._host, self._port)
                for words in (self._login, ("SELECT", self._database)):
                    reply = await line.ask(*words) if words else None
                    if isinstance(reply, hiredis.ReplyError):
                        raise StoreUnavailableError(f"Redis refuses: {reply}")
        except (OSError, TimeoutError) as error:
            line.close()
            raise StoreUnavailableError(f"{type(error).__name__}: {error}") from error
        except StoreUnavailableError:
            line.close()
            raise
        line.is_open = True
        return line


def _login(username: str | None, password: str) -> tuple[Argument, ...]:
    if not password:
        return ()
    return ("AUTH", username, password) if username else ("AUTH", password)


def script_name(script: str) -> str:
    """Returns the name (SHA-1) under which Redis caches a script that it ran."""
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
