"""Arrival times of requests: when bytes came to this machine, not when the process read them.

While the process is late, bytes wait in the kernel and connections wait to be accepted. Deadlines
count from the arrival. Linux tells how long ago a connection's last bytes arrived (tcp(7),
`TCP_INFO`). Tests: tests/integration/test_gateway_arrivals.py.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable

from aiohttp import web

from kvmesh.runtime.http_connection import HttpConnection

LATE_S = 0.01
"""Seconds that bytes may have waited before the kernel is asked about them. Asking takes 5 us."""

# struct tcp_info of linux/tcp.h, up to the field with the milliseconds since the last bytes
# arrived.
_INFO_BYTES = 56
_last_data_ms = struct.Struct("I").unpack_from
_LAST_DATA_AT = 52


class Arrivals:
    """Dates the bytes of all connections of a gateway."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._read_at = self._now()
        self._gap_s = 0.0

    def of_known(self, transport: asyncio.BaseTransport) -> float:
        """Like `of`, but cheaper; for a connection that was read before."""
        read_at = self._now()
        if read_at != self._read_at:  # uvloop's clock is constant within an iteration
            self._gap_s, self._read_at = read_at - self._read_at, read_at
        # Bytes that arrived before the last read were read then, so these are at most that old.
        return read_at if self._gap_s < LATE_S else self.of(transport)

    def of(self, transport: asyncio.BaseTransport) -> float:
        """When a connection's last bytes arrived, in seconds on the loop's clock.

        Call it at their read.
        """
        read_at = self._now()
        sock = transport.get_extra_info("socket")
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:  # closed meanwhile, or not TCP
            return read_at
        if len(info) < _INFO_BYTES:
            return read_at
        waited_ms: int = _last_data_ms(info, _LAST_DATA_AT)[0]
        return min(read_at, time.monotonic() - waited_ms / 1000)


class DatedConnection(HttpConnection):
    """A connection of aiohttp's server that knows when its newest request arrived.

    Args:
        arrivals: dates the connection's bytes.
    """

    __slots__ = ("_arrivals", "_arrived_at")

    def __init__(
        self,
        arrivals: Arrivals,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        idle_timeout_s: float,
        refusal: Callable[[int, str], web.Response],
    ) -> None:
        super().__init__(server, loop, idle_timeout_s, refusal)
        self._arrivals = arrivals
        self._arrived_at: float | None = None

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if not self.is_asked_in_full:
            assert self.transport is not None, "connected"
            self._arrived_at = self._arrivals.of(self.transport)
        super().data_received(data)

    def arrival(self) -> float:
        """When the request that starts now arrived, in seconds on the loop's clock.

        A pipelined request's arrival is the end of the previous answer.
        """
        arrived_at, self._arrived_at = self._arrived_at, None
        return self._loop.time() if arrived_at is None else arrived_at
