"""A connection of the HTTP server, with refusals of its own in the API's form.

What the server cannot read never reaches a route: it would answer in plain text with its version,
and log each such request as an error, with the line that it stumbled over. That line may hold a
key, and anybody can send one.
Tests: tests/integration/test_http_hostile.py.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

from aiohttp import web

from kvmesh.telemetry.logs import event_logger
from services.gateway.answers import dumps
from services.gateway.errors import plain_http_error

log = event_logger(__name__)

_NOTHING = logging.Logger("no access log", logging.CRITICAL + 1)
"""Requests are told by who serves them."""


class HttpConnection(web.RequestHandler):
    """One connection.

    Args:
        server: what it belongs to.
        idle_timeout_s: it is closed when nothing was asked for so long.
    """

    __slots__ = ()

    def __init__(
        self, server: web.Server, loop: asyncio.AbstractEventLoop, idle_timeout_s: float
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=_NOTHING,
            keepalive_timeout=idle_timeout_s,
            auto_decompress=False,  # a thousand bytes out of one, on the event loop
        )

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
            text = "an error inside the gateway"
        else:
            log.debug("http_unreadable", error=type(exc).__name__)
            # The first line says what is wrong; then come the bytes themselves.
            text = f"not HTTP: {(message or '').partition(chr(10))[0].strip(' :') or 'unreadable'}"
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        answer = plain_http_error(status, text)
        response = web.json_response(answer.body, status=status, dumps=dumps)
        response.headers["Server"] = "kvmesh"
        response.force_close()
        return response
