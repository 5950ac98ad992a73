"""A connection of an HTTP server, with refusals in the owner's own format.

Requests that aiohttp cannot parse never reach a route. aiohttp would answer them in plain text with
its own and Python's version. It would also log each one as an error, with the bad line. That line
may contain a key, and anybody can send one.
Tests: tests/integration/test_http_hostile.py, tests/integration/test_admin_guard.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from aiohttp import HttpVersion11, web

from kvmesh.runtime.half_closed import INTERIM, HalfClosedProbe, can_half_close
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

INTERNAL_ERROR = "an error inside this service"
"""The client's message for an internal error; the log has the details."""

_NOTHING = logging.Logger("no access log", logging.CRITICAL + 1)
"""A logger that drops everything: the server's owner logs requests itself."""


class Payload(Protocol):
    """The body of a request."""

    def is_eof(self) -> bool:
        """Whether the body is complete."""
        ...


class HttpProtocol(asyncio.Protocol):
    """A connection of an HTTP server."""

    __slots__ = ()

    @property
    def is_busy(self) -> bool:
        """Whether a request is in progress; False before the first one."""
        return False


class HttpConnection(web.RequestHandler, HttpProtocol):
    """One connection.

    Args:
        server: aiohttp's server.
        idle_timeout_s: seconds without a request after which the connection is closed.
        refusal: makes the answer from a status and an explanation.
    """

    __slots__ = ("_newest", "_probe", "_probed", "_refusal", "_was_probed")

    def __init__(
        self,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        idle_timeout_s: float,
        refusal: Callable[[int, str], web.Response],
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=_NOTHING,
            keepalive_timeout=idle_timeout_s,
            auto_decompress=False,  # would make a thousand bytes of one, on the event loop
        )
        self._refusal = refusal
        self._newest: tuple[object, Payload] | None = None  # message and body of the newest request
        self._probe: HalfClosedProbe | None = None
        self._probed: web.BaseRequest | None = None
        self._was_probed = False

    @property
    def is_busy(self) -> bool:
        """See HttpProtocol."""
        is_waiting = self._waiter is not None and not self._waiter.done()
        return self._newest is not None and not is_waiting

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        if self._messages:
            self._newest = self._messages[-1]

    def eof_received(self) -> bool | None:  # type: ignore[override]  # aiohttp always closes
        """Answers a complete request, then closes; ends an incomplete one at once."""
        transport = self.transport
        if transport is None or not can_half_close(transport) or not self.is_asked_in_full:
            return None
        self.close()  # takes effect after the answer
        self._probe = HalfClosedProbe(transport, self._interim)
        self._probe.start()
        return True

    @property
    def is_asked_in_full(self) -> bool:
        """Whether a complete request is in progress whose client understands probes."""
        if not self.is_busy or self._newest is None:
            return False
        message, payload = self._newest
        version = getattr(message, "version", None)  # an unreadable request has no version
        return payload.is_eof() and version is not None and version >= HttpVersion11

    def _interim(self) -> bytes:
        """Bytes that may be written before the answer; empty once the answer has begun."""
        is_first, self._was_probed = not self._was_probed, True
        self._probed = self._current_request or self._probed
        if self._probed is None:  # its handler is about to start at first, and has ended later
            return INTERIM if is_first else b""
        return b"" if self._probed.writer.output_size > 0 else INTERIM

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio.Protocol."""
        if self._probe is not None:
            self._probe.close()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to an unreadable request or to a failed one. The connection ends with it.

        Raises:
            ConnectionError: an answer has already begun.
        """
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            if exc is not None:
                log.failure("http_request_failed", exc)
            text = INTERNAL_ERROR
        else:
            log.debug("http_unreadable", error=type(exc).__name__)
            # The first line explains the error; the bad bytes follow it.
            text = f"not HTTP: {(message or '').partition(chr(10))[0].strip(' :') or 'unreadable'}"
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        response = self._refusal(status, text)
        response.headers["Server"] = "kvmesh"
        response.force_close()
        return response
