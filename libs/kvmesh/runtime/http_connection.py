"""A connection of an HTTP server, with refusals of the owner's own form.

What aiohttp cannot read never reaches a route: it would answer in plain text with its version and
Python's, and log each such request as an error, with the line that it stumbled over. That line may
hold a key, and anybody can send one.
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
"""What a client is told of what went wrong here; the log says more."""

_NOTHING = logging.Logger("no access log", logging.CRITICAL + 1)
"""Requests are told by who serves them."""


class Payload(Protocol):
    """The body of a request."""

    def is_eof(self) -> bool:
        """Whether all of it is here."""
        ...


class HttpProtocol(asyncio.Protocol):
    """A connection of an HTTP server."""

    __slots__ = ()

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way; before the first one there is none."""
        return False


class HttpConnection(web.RequestHandler, HttpProtocol):
    """One connection.

    Args:
        server: what it belongs to.
        idle_timeout_s: it is closed when nothing was asked for so long.
        refusal: the answer to a status and what is wrong.
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
            auto_decompress=False,  # a thousand bytes out of one, on the event loop
        )
        self._refusal = refusal
        self._newest: tuple[object, Payload] | None = None  # message and body
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
        """Answers what has been asked in full, then closes; a part of a request ends at once."""
        transport = self.transport
        if transport is None or not can_half_close(transport) or not self.is_asked_in_full:
            return None
        self.close()  # after the answer
        self._probe = HalfClosedProbe(transport, self._interim)
        self._probe.start()
        return True

    @property
    def is_asked_in_full(self) -> bool:
        """Whether a request is under way, all of it is here and its client understands probes."""
        if not self.is_busy or self._newest is None:
            return False
        message, payload = self._newest
        version = getattr(message, "version", None)  # what could not be read has none
        return payload.is_eof() and version is not None and version >= HttpVersion11

    def _interim(self) -> bytes:
        """What may be written before the answer; empty once it has begun."""
        is_first, self._was_probed = not self._was_probed, True
        self._probed = self._current_request or self._probed
        if self._probed is None:  # at first its handler is about to start, later it has ended
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
        """The answer to what could not be read, or went wrong; the connection ends with it.

        Raises:
            ConnectionError: an answer has begun already.
        """
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            if exc is not None:
                log.failure("http_request_failed", exc)
            text = INTERNAL_ERROR
        else:
            log.debug("http_unreadable", error=type(exc).__name__)
            # The first line says what is wrong; then come the bytes themselves.
            text = f"not HTTP: {(message or '').partition(chr(10))[0].strip(' :') or 'unreadable'}"
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        response = self._refusal(status, text)
        response.headers["Server"] = "kvmesh"
        response.force_close()
        return response
