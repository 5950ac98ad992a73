"""Keeps who has no token from holding the admin port's connections.

Stands between a connection and aiohttp: one whose headers do not come in time is cut, and of too
many callers that have not been let in yet the oldest. Tests: tests/integration/test_admin_guard.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from kvmesh.core.newcomers import MAX_NEWCOMERS, Newcomers

HEADER_TIMEOUT_S = 10.0
"""The first request line and headers, and TLS before them, must come within this."""

IDLE_TIMEOUT_S = 75.0
"""A connection is closed when nothing was asked for so long."""

_END_OF_HEADERS = b"\r\n\r\n"


class AdminGuard:
    """All connections of an admin port.

    Args:
        header_timeout_s: see `HEADER_TIMEOUT_S`.
        limit: most connections of callers that have not been let in.
    """

    def __init__(
        self, header_timeout_s: float = HEADER_TIMEOUT_S, limit: int = MAX_NEWCOMERS
    ) -> None:
        self.header_timeout_s = header_timeout_s
        self.newcomers = Newcomers[asyncio.BaseTransport](_abort, limit)

    def wrap(self, factory: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """A factory of guarded connections."""
        return lambda: _Guarded(self, factory())

    def let_in(self, transport: asyncio.BaseTransport | None) -> None:
        """Who calls there may call: the connection gives way to nobody any more."""
        if transport is not None:
            self.newcomers.leave(transport)


class _Guarded(asyncio.Protocol):
    """One connection; everything goes on to `inner`."""

    def __init__(self, guard: AdminGuard, inner: asyncio.Protocol) -> None:
        self._guard = guard
        self._inner = inner
        self._tail = b""
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._inner.connection_made(transport)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._guard.header_timeout_s, _abort, transport)
        self._guard.newcomers.enter(transport)

    def data_received(self, data: bytes) -> None:
        if self._timer is not None:
            seen = self._tail + data
            self._tail = seen[-(len(_END_OF_HEADERS) - 1) :]
            if _END_OF_HEADERS in seen:
                self._stop_timer()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        assert self._transport is not None, "it was made"
        self._guard.newcomers.leave(self._transport)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None


def _abort(transport: asyncio.BaseTransport) -> None:
    # Those of uvloop have all of a transport's methods, but not its type.
    cast("asyncio.Transport", transport).abort()
