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

from aiohttp import web

from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

INTERNAL_ERROR = "an error inside this service"
"""What a client is told of what went wrong here; the log says more."""

_NOTHING = logging.Logger("no access log", logging.CRITICAL + 1)
"""Requests are told by who serves them."""


class HttpConnection(web.RequestHandler):
    """One connection.

    Args:
        server: what it belongs to.
        idle_timeout_s: it is closed when nothing was asked for so long.
        refusal: the answer to a status and what is wrong.
    """

    __slots__ = ("_refusal",)

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
