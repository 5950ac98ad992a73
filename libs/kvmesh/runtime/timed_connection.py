"""A connection of an HTTP port whose first request line and headers must arrive in time.

It is between the connection and its server. (The server's idle limit covers later headers on the
same connection.) Tests: tests/integration/test_admin_guard.py,
tests/integration/test_http_guard.py.
"""

from __future__ import annotations

import asyncio
from typing import cast

_END_OF_HEADERS = b"\r\n\r\n"


class TimedConnection(asyncio.Protocol):
    """One connection, which passes everything on to `inner`.

    Args:
        header_timeout_s: seconds after its start when the connection is cut.
    """

    def __init__(self, inner: asyncio.Protocol, header_timeout_s: float) -> None:
        self._inner = inner
        self._header_timeout_s = header_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._tail = b""

    @property
    def has_asked(self) -> bool:
        """Whether the head of its first request has arrived."""
        return self._timer is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._header_timeout_s, self._too_slow, transport)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._timer is not None:
            # Servers skip empty lines before a request, so these do not end the headers.
            seen = self._tail + data if self._tail else data.lstrip(b"\r\n")
            self._tail = seen[-(len(_END_OF_HEADERS) - 1) :]
            if _END_OF_HEADERS in seen:
                self._stop_timer()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """See asyncio.Protocol."""
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop_timer()
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._inner.resume_writing()

    def _too_slow(self, transport: asyncio.BaseTransport) -> None:
        self._timer = None
        abort(transport)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None


def abort(transport: asyncio.BaseTransport) -> None:
    """Ends a connection immediately."""
    # uvloop's transports have all methods of the type, but are not subclasses.
    cast("asyncio.Transport", transport).abort()
