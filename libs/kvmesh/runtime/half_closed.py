"""Distinguishes a client that only stopped sending from one that left.

Both send FIN. The first still reads and must get its answer; work for the second is wasted. Only a
write distinguishes them: the kernel of a client that left answers it with a reset, and the next
write fails. Clients skip any number of "100 Continue" before an answer (RFC 9110, section 15.2),
and comments between server-sent events.
Tests: tests/integration/test_http_half_closed.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST_PAUSE_S = 0.1
"""Seconds before the second write; longer than the reset takes from nearly all clients."""
PAUSE_S = 1.0


def can_half_close(transport: asyncio.BaseTransport) -> bool:
    """Whether one direction can end alone: a TLS connection ends as a whole."""
    return transport.get_extra_info("sslcontext") is None


class HalfClosedProbe:
    """Writes to a connection whose client has sent FIN, until a write fails or there is an answer.

    A write that fails closes the transport, and its protocol gets `connection_lost`.

    Args:
        probe: returns bytes that the client skips at this point of its answer; empty when no answer
            is left to wait for.
    """

    def __init__(self, transport: asyncio.Transport, probe: Callable[[], bytes]) -> None:
        self._transport = transport
        self._probe = probe
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Writes for the first time."""
        self._write(FIRST_PAUSE_S)

    def _write(self, pause_s: float) -> None:
        self._timer = None
        probe = self._probe()
        if probe and not self._transport.is_closing():
            self._transport.write(probe)
            self._timer = self._loop.call_later(pause_s, self._write, PAUSE_S)

    def close(self) -> None:
        """Stops probing. May be called again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
