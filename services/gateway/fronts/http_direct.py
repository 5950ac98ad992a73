"""A fast path for plain completion requests: from the socket to `Calls`, without aiohttp.

Most requests are a POST of a few hundred bytes to one of two paths, sent whole. This module reads
and answers them. At the first other request (odd, slow, large or wrong) it hands the connection
over to aiohttp, with that request unread. The connection stays there: aiohttp alone decides about
such requests. Tests: tests/integration/test_http_direct.py.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import cast

from kvmesh.core.errors import KvMeshError
from kvmesh.core.types import Refusal, RefusalReason
from kvmesh.runtime.half_closed import INTERIM, HalfClosedProbe, can_half_close
from kvmesh.runtime.http_connection import INTERNAL_ERROR, HttpProtocol
from kvmesh.telemetry.logs import event_logger
from services.gateway.api.answers import dumps
from services.gateway.config import HttpConfig
from services.gateway.errors import (
    ErrorAnswer,
    Stage,
    StageRefusedError,
    answer_for,
    plain_http_error,
)
from services.gateway.frontend import clean_request_id
from services.gateway.fronts.arrivals import Arrivals
from services.gateway.fronts.calls import Calls, Headers, given_request_id
from services.gateway.fronts.http_guard import Factory
from services.gateway.fronts.http_head import PlainHead, plain_head
from services.gateway.fronts.joined_writer import JoinedWriter, Turn

log = event_logger(__name__)

MAX_DIRECT_BYTES = 256 * 1024
"""Maximum bytes of a request on the fast path; longer ones go to aiohttp.

While a request is answered, this limits the bytes read ahead.
"""

BODY_PATIENCE_S = 1.0
"""Seconds after a request's head in which its body must be complete; else it goes to aiohttp."""

_SSE_COMMENT = b":\n\n"
_STOPPED = Refusal(
    RefusalReason.DRAINING, "this gateway stopped before the answer was complete; ask again"
)
_JSON = {"Content-Type": "application/json; charset=utf-8"}


class DirectHttp:
    """All connections of an HTTP port.

    Args:
        arrivals: tells when requests arrived.
        is_draining: whether connections are to close after their next answer.
    """

    def __init__(
        self,
        calls: Calls,
        arrivals: Arrivals,
        config: HttpConfig,
        is_draining: Callable[[], bool],
    ) -> None:
        self.calls = calls
        self.arrivals = arrivals
        self.config = config
        self.is_draining = is_draining
        self._open: set[_Connection] = set()
        self.turn = Turn()

    def wrap(self, factory: Factory) -> Factory:
        """Returns a factory of connections that start on the fast path.

        Args:
            factory: makes the aiohttp protocol for a handover.
        """
        return lambda: _Connection(self, factory)

    def enter(self, connection: _Connection) -> None:
        """Registers an open connection."""
        self._open.add(connection)

    def leave(self, connection: _Connection) -> None:
        """Removes a connection that is closed or was handed over."""
        self._open.discard(connection)

    async def close(self) -> None:
        """Closes all connections and waits for their requests to end."""
        tasks = [task for connection in tuple(self._open) if (task := connection.close())]
        await asyncio.gather(*tasks, return_exceptions=True)


class _Connection(HttpProtocol):
    """One connection, while all its requests are plain."""

    def __init__(self, front: DirectHttp, factory: Factory) -> None:
        self._front = front
        self._factory = factory
        self._inner: HttpProtocol | None = None  # aiohttp, after the handover
        self._transport: asyncio.Transport | None = None
        self._writer: JoinedWriter | None = None
        self._buffer = bytearray()
        self._arrived_at = 0.0  # arrival of the request's last bytes; 0.0 before the first
        self._head: PlainHead | None = None  # a parsed head whose body is not complete yet
        self._task: asyncio.Task[None] | None = None
        self._exchange: _DirectExchange | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._is_reading = True
        self._probe: HalfClosedProbe | None = None  # set when the client closed its sending side
        self._loop = asyncio.get_running_loop()  # looked up once: it costs a system call
        self.drained: asyncio.Future[None] | None = None

    # --- from the loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass, but has all methods used here.
        self._transport = cast("asyncio.Transport", transport)
        self._writer = JoinedWriter(self._transport, self._front.turn)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._front.enter(self)

    def data_received(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)
            return
        if self._task is None:
            assert self._transport is not None, "connected"
            arrivals = self._front.arrivals
            self._arrived_at = (
                arrivals.of_known(self._transport)
                if self._arrived_at
                else arrivals.of(self._transport)
            )
        self._buffer += data
        if self._task is None:
            self._next()
        elif len(self._buffer) > MAX_DIRECT_BYTES and self._is_reading:
            assert self._transport is not None, "connected"
            self._transport.pause_reading()
            self._is_reading = False

    @property
    def is_busy(self) -> bool:
        return self._task is not None if self._inner is None else self._inner.is_busy

    def eof_received(self) -> bool | None:
        if self._inner is not None:
            return self._inner.eof_received()
        transport, exchange = self._transport, self._exchange
        if transport is None or exchange is None or not can_half_close(transport):
            return None
        self._look_for_client(transport, exchange)
        return True

    def _look_for_client(self, transport: asyncio.Transport, exchange: _DirectExchange) -> None:
        """Probes a half-closed client, to notice when it leaves."""
        self._probe = HalfClosedProbe(transport, exchange.probe)
        self._probe.start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        self._front.leave(self)
        self._transport = None
        if self._inner is not None:
            self._inner.connection_lost(exc)
        if self._task is not None:
            self._task.cancel()  # this also cancels its work in the mesh

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()
        else:
            self.drained = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()
        elif self.drained is not None:
            if not self.drained.done():  # the waiting task may have been cancelled
                self.drained.set_result(None)
            self.drained = None

    # --- requests, one after the other ---

    def _next(self) -> None:
        """Starts the buffer's first request if it is complete."""
        head = self._head or plain_head(self._buffer)
        limit = min(MAX_DIRECT_BYTES, self._front.config.max_body_bytes)
        if head is None or head.num_body_bytes > limit:
            self._hand_over()
            return
        end = head.num_bytes + head.num_body_bytes
        if len(self._buffer) < end:
            if self._head is None:
                self._head = head
                self._patience = self._loop.call_later(BODY_PATIENCE_S, self._hand_over)
            return
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._head = None
        body = bytes(memoryview(self._buffer)[head.num_bytes : end])
        del self._buffer[:end]
        assert self._writer is not None, "connected"
        is_draining = self._front.is_draining
        self._exchange = _DirectExchange(
            self, self._writer, head, body, self._arrived_at, is_draining
        )
        self._task = self._loop.create_task(self._answer(self._exchange, head))
        self._task.add_done_callback(self._ended)

    async def _answer(self, exchange: _DirectExchange, head: PlainHead) -> None:
        try:
            whole = await self._front.calls.answer(head.endpoint, exchange)
        except KvMeshError as error:
            exchange.refuse(answer_for(error))
            return
        if whole is not None:
            exchange.respond(HTTPStatus.OK, whole.headers, whole.content)

    def _ended(self, task: asyncio.Task[None]) -> None:
        exchange, self._task, self._exchange = self._exchange, None, None
        transport = self._transport
        if not task.cancelled() and (error := task.exception()) is not None:
            log.failure("http_request_failed", error)
            if transport is not None and exchange is not None:
                if not exchange.has_begun:
                    exchange.refuse(plain_http_error(500, INTERNAL_ERROR))
                transport.close()
            return
        if task.cancelled() or transport is None or transport.is_closing():
            return
        if exchange is not None and exchange.is_last:
            transport.close()
            return
        if self._probe is not None:
            self._probe.close()
            self._finish(transport)
            return
        loop = self._loop
        self._idle_since = loop.time()
        if self._idle is None:
            self._idle = loop.call_later(self._front.config.idle_timeout_s, self._look_idle)
        if self._buffer:
            # A pipelined request's arrival is the end of the previous answer.
            self._arrived_at = loop.time()
            self._next()
        if not self._is_reading:
            self._is_reading = True
            transport.resume_reading()

    def _finish(self, transport: asyncio.Transport) -> None:
        """Answers the requests that a client sent before its FIN, then closes the connection."""
        if self._buffer:
            self._next()
        if self._inner is not None:
            if not self._inner.eof_received():
                transport.close()
        elif self._exchange is not None:
            self._look_for_client(transport, self._exchange)
        else:
            transport.close()

    def _hand_over(self) -> None:
        """Hands the connection over to aiohttp."""
        assert self._transport is not None, "connected"
        self._stop_timers()
        self._front.leave(self)
        self._inner = inner = self._factory()
        inner.connection_made(self._transport)
        if self.drained is not None:
            inner.pause_writing()
        data, self._buffer = bytes(self._buffer), bytearray()
        inner.data_received(data)

    def _look_idle(self) -> None:
        """Closes the connection if it has been idle for too long; else checks again later."""
        loop = self._loop
        timeout_s = self._front.config.idle_timeout_s
        is_idle = self._task is None and self._head is None
        since = self._idle_since if is_idle else loop.time()
        if since + timeout_s <= loop.time():
            assert self._transport is not None, "connected"
            self._transport.close()
        else:
            self._idle = loop.call_at(since + timeout_s, self._look_idle)

    def _stop_timers(self) -> None:
        for timer in (self._patience, self._idle):
            if timer is not None:
                timer.cancel()
        self._patience = self._idle = None
        if self._probe is not None:
            self._probe.close()

    def close(self) -> asyncio.Task[None] | None:
        """Closes the connection: refuses and cancels its request, and returns its task."""
        if self._exchange is not None and self._transport is not None:
            self._exchange.give_up(answer_for(StageRefusedError(_STOPPED, Stage.GATEWAY)))
        if self._transport is not None:
            self._transport.close()
        if self._task is not None:
            self._task.cancel()
        return self._task


class _DirectExchange:
    """One request and its answer, as `Calls` sees it."""

    def __init__(
        self,
        connection: _Connection,
        writer: JoinedWriter,
        head: PlainHead,
        body: bytes,
        arrived_at: float,
        is_draining: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._writer = writer
        self._head = head
        self._body = body
        self.arrived_at = arrived_at
        self.request_id = clean_request_id(given_request_id(head.headers))
        self._is_draining = is_draining
        self.has_begun = False
        self._is_stream = False
        self.is_last = False  # the answer told the client that the connection closes after it

    @property
    def headers(self) -> Headers:
        return self._head.headers

    async def body(self) -> bytes:
        return self._body

    def begin(self, headers: Mapping[str, str], data: bytes) -> None:
        head = self._head_bytes(HTTPStatus.OK, headers, {"Transfer-Encoding": "chunked"})
        self.has_begun = self._is_stream = True
        self._writer.write_now(head + _chunk(data))

    def write(self, data: bytes) -> None:
        self._writer.write(_chunk(data))

    def end(self, data: bytes) -> None:
        self._is_stream = False
        self._writer.write_now(_chunk(data) + b"0\r\n\r\n")

    async def sent(self) -> None:
        drained = self._connection.drained
        if drained is not None:
            await drained

    def respond(self, status: HTTPStatus, headers: Mapping[str, str], content: bytes) -> None:
        """Sends the whole answer."""
        more = {**_JSON, "Content-Length": str(len(content))}
        self.has_begun = True
        self._writer.write_now(self._head_bytes(status, headers, more) + content)

    def refuse(self, answer: ErrorAnswer) -> None:
        """Sends an error as the answer."""
        self.respond(HTTPStatus(answer.status), answer.headers, dumps(answer.body).encode())

    def probe(self) -> bytes:
        """Bytes that the client ignores at this point; see `HalfClosedProbe`."""
        if not self.has_begun:
            return INTERIM
        return _chunk(_SSE_COMMENT) if self._is_stream else b""

    def give_up(self, answer: ErrorAnswer) -> None:
        """Ends the answer early: with a refusal, or with an error as the last event."""
        if not self.has_begun:
            self.refuse(answer)
        elif self._is_stream:
            event = f"data: {dumps(answer.body)}\n\n".encode()
            self._writer.write_now(_chunk(event) + b"0\r\n\r\n")

    def _head_bytes(
        self, status: HTTPStatus, headers: Mapping[str, str], more: Mapping[str, str]
    ) -> bytes:
        lines = [f"HTTP/1.1 {status:d} {status.phrase}"]
        lines += [f"{name}: {value}" for part in (headers, more) for name, value in part.items()]
        lines += (f"x-request-id: {self.request_id}", "Server: kvmesh", f"Date: {_date()}")
        if self._is_draining():
            self.is_last = True
            lines.append("Connection: close")
        head = "\r\n".join(lines)
        assert head.count("\n") == len(lines) - 1, "a header with a line end in it"
        return head.encode() + b"\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    """An HTTP chunk; an empty one would end the answer."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def _date() -> str:
    return _date_at(int(time.time()))


@lru_cache(maxsize=1)
def _date_at(second: int) -> str:
    """The Date header; cached for one second."""
    return formatdate(second, usegmt=True)
