"""Keeps callers without a token from exhausting the admin port's connections.

It cuts a connection whose headers do not arrive in time. If too many callers have not been
admitted yet, it cuts the oldest. Tests: tests/integration/test_admin_guard.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvmesh.core.newcomers import MAX_NEWCOMERS, Newcomers
from kvmesh.runtime.timed_connection import TimedConnection, abort

HEADER_TIMEOUT_S = 10.0
"""Seconds for TLS, the first request line and its headers to arrive."""

IDLE_TIMEOUT_S = 75.0
"""Seconds without a request after which a connection is closed."""


class AdminGuard:
    """All connections of an admin port.

    Args:
        header_timeout_s: see `HEADER_TIMEOUT_S`.
        limit: maximum number of connections whose callers have not been admitted.
    """

    def __init__(
        self, header_timeout_s: float = HEADER_TIMEOUT_S, limit: int = MAX_NEWCOMERS
    ) -> None:
        self.header_timeout_s = header_timeout_s
        self.newcomers = Newcomers[asyncio.BaseTransport](abort, limit)

    def wrap(self, factory: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """Returns a factory of guarded connections."""
        return lambda: _Guarded(self, factory())

    def let_in(self, transport: asyncio.BaseTransport | None) -> None:
        """Admits a connection whose caller is authorised: it no longer gives way to others."""
        if transport is not None:
            self.newcomers.leave(transport)


class _Guarded(TimedConnection):
    """One connection; a newcomer until it is admitted."""

    def __init__(self, guard: AdminGuard, inner: asyncio.Protocol) -> None:
        super().__init__(inner, guard.header_timeout_s)
        self._newcomers = guard.newcomers
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        super().connection_made(transport)
        self._newcomers.enter(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        assert self._transport is not None, "it was made"
        self._newcomers.leave(self._transport)
        super().connection_lost(exc)
