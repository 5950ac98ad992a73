"""Keeps slow and greedy clients of the HTTP port from holding up others.

The guard is between a connection and the HTTP server. It counts connections, in all and per
address. It cuts a connection whose first request line and headers do not arrive in time, and one
whose client does not read. When the port is full, a silent connection gives way to a new one: the
oldest that has not sent a request yet, else the one that has been idle for longest.
Tests: tests/integration/test_http_guard.py.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from kvmesh.runtime.http_connection import HttpProtocol
from kvmesh.runtime.timed_connection import TimedConnection, abort
from services.gateway.config import HttpConfig
from services.gateway.metrics import GatewayMetrics


class Factory(Protocol):
    """Makes the protocol of a connection."""

    def __call__(self) -> HttpProtocol:
        """Makes the protocol of one more connection."""
        ...


class ConnectionGuard:
    """All connections of an HTTP port."""

    def __init__(self, config: HttpConfig, metrics: GatewayMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self._per_address: Counter[str] = Counter()
        # Connections without a request are in the order of their start, others of their last byte.
        self._unasked: dict[_Guarded, None] = {}
        self._asked: dict[_Guarded, None] = {}

    @property
    def num_open(self) -> int:
        """Number of connections that were admitted and are open."""
        return self._per_address.total()

    def wrap(self, factory: Factory) -> Callable[[str], asyncio.Protocol | None]:
        """Guards connections; each counts before its protocol exists.

        Returns:
            A function that makes the protocol for an address; None refuses the connection. The
                caller calls `turned_away` if the connection ends before `connection_made`.
        """

        def come(address: str) -> asyncio.Protocol | None:
            if not self.enter(address):
                return None
            return _Guarded(self, factory(), self._config, address)

        return come

    def turned_away(self, connection: asyncio.Protocol) -> None:
        """Uncounts a connection that failed before `connection_made`; ignores later ones."""
        assert isinstance(connection, _Guarded), "made here"
        connection.never_made()

    def enter(self, address: str) -> bool:
        """Counts a connection; False refuses it."""
        config = self._config
        if 0 < config.max_connections_per_address <= self._per_address[address]:
            self.cut("address")
            return False
        if 0 < config.max_connections <= self.num_open and not self._make_room():
            self.cut("full")
            return False
        self._per_address[address] += 1
        self._metrics.connections.set(self.num_open)
        return True

    def _make_room(self) -> bool:
        """Closes the connection that was silent for longest; False if all have open requests."""
        silent = next(iter(self._unasked), None)
        if silent is None:
            silent = next((each for each in self._asked if not each.is_busy), None)
        if silent is None:
            return False
        self.cut("gave_way")
        silent.give_way()
        return True

    def heard(self, connection: _Guarded, *, has_asked: bool) -> None:
        """Notes that a connection sent something.

        Args:
            has_asked: it has sent the head of a request, now or earlier.
        """
        if has_asked:
            self._unasked.pop(connection, None)
            self._asked.pop(connection, None)
            self._asked[connection] = None
        else:
            self._unasked.setdefault(connection)

    def forget(self, connection: _Guarded) -> None:
        """Removes a connection from those that can give way. May be called again."""
        self._unasked.pop(connection, None)
        self._asked.pop(connection, None)

    def leave(self, address: str) -> None:
        """Uncounts an admitted connection that was closed."""
        self._per_address[address] -= 1
        if not self._per_address[address]:
            del self._per_address[address]
        self._metrics.connections.set(self.num_open)

    def cut(self, reason: str) -> None:
        """Counts a connection that is cut."""
        self._metrics.connections_cut.labels(reason).inc()


class _Guarded(TimedConnection):
    """One connection."""

    def __init__(
        self,
        guard: ConnectionGuard,
        inner: HttpProtocol,
        config: HttpConfig,
        address: str,
    ) -> None:
        super().__init__(inner, config.header_timeout_s)
        self._guard = guard
        self._http = inner
        self._stall_timeout_s = config.stall_timeout_s
        self._address = address
        self._is_made = False
        self._transport: asyncio.BaseTransport | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a request is in progress."""
        return self._http.is_busy

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._is_made = True
        self._transport = transport
        self._guard.heard(self, has_asked=False)
        _limit_stalls(transport, self._stall_timeout_s)
        super().connection_made(transport)

    def never_made(self) -> None:
        if not self._is_made:
            self._guard.leave(self._address)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._guard.heard(self, has_asked=self.has_asked)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.forget(self)
        self._guard.leave(self._address)
        super().connection_lost(exc)

    def give_way(self) -> None:
        """Ends the connection in favour of a new one."""
        assert self._transport is not None, "let in"
        self._guard.forget(self)
        abort(self._transport)

    def _too_slow(self, transport: asyncio.BaseTransport) -> None:
        self._guard.cut("slow_headers")
        super()._too_slow(transport)


def _limit_stalls(transport: asyncio.BaseTransport, timeout_s: float) -> None:
    """Makes the kernel cut the connection if the peer acknowledges nothing for that long."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1000))
