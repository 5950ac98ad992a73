"""A listening port that accepts all waiting clients at once and counts them from their start.

An asyncio server tells a protocol of its connection only after the TLS handshake. Until then no
limit counts it, and silent clients could use up all file descriptors. This port asks for a protocol
when a client connects. If there are too many handshakes, it cuts the oldest.

A uvloop server accepts one connection per event-loop iteration, even if many are waiting. A busy
loop has few iterations per second, so clients would wait unnoticed for many seconds. This port
accepts all waiting clients in one iteration.
Tests: tests/integration/test_listening_port.py.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Callable

from kvmesh.core.newcomers import MAX_NEWCOMERS, Newcomers
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

Come = Callable[[str], "asyncio.Protocol | None"]
"""Returns the protocol for a connection from this address; None refuses the connection."""

ACCEPT_PAUSE_S = 0.1
"""Seconds to pause after a connection could not be accepted."""


def _nothing(_: asyncio.Protocol) -> None:
    """Does nothing: the default for `failed`."""


class ListeningPort:
    """Listens, and accepts clients.

    Args:
        context: certificates and checks of this side; None is without TLS.
        timeout_s: seconds after which a handshake is cut.
        come: makes protocols.
        failed: called with each protocol whose handshake failed. If the port closes at the same
            moment, the connection may have been made all the same.
        limit: maximum number of handshakes at once.
    """

    def __init__(
        self,
        context: ssl.SSLContext | None,
        timeout_s: float,
        come: Come,
        failed: Callable[[asyncio.Protocol], None] = _nothing,
        limit: int = MAX_NEWCOMERS,
    ) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._come = come
        self._failed = failed
        self._listeners: list[socket.socket] = []
        self._greeting: set[asyncio.Task[None]] = set()
        self._limit = limit
        self._backlog = 1
        self._newcomers = Newcomers[asyncio.Task[None]](asyncio.Task.cancel, limit)

    @property
    def num_greeting(self) -> int:
        """Number of handshakes in progress."""
        return len(self._greeting)

    async def start(
        self, host: str, port: int, *, backlog: int = 100, reuse_port: bool = False
    ) -> int:
        """Listens. Returns the bound port, or the first one if the host has several addresses.

        Raises:
            OSError: the address cannot be bound.
        """
        assert not self._listeners, "started once"
        self._backlog = backlog
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                listener = socket.create_server(
                    (str(address[0]), port), family=family, backlog=backlog, reuse_port=reuse_port
                )
                listener.setblocking(False)
                self._listeners.append(listener)
        except OSError:
            self.close()
            raise
        for listener in self._listeners:
            loop.add_reader(listener.fileno(), self._accept, listener)
        bound: int = self._listeners[0].getsockname()[1]
        return bound

    def close(self) -> None:
        """Stops listening and cuts handshakes; open connections continue. May be called again."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        for task in tuple(self._greeting):
            task.cancel()

    def _accept(self, listener: socket.socket) -> None:
        """Accepts all waiting clients; with TLS, at most as many as there may be handshakes."""
        room = self._backlog if self._context is None else self._limit - len(self._greeting)
        for _ in range(max(1, room)):
            try:
                sock, peer = listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # out of file descriptors
                log.warning("accept_failed", error=str(error))
                self._pause(listener)
                return
            self._take_in(sock, str(peer[0]))

    def _take_in(self, sock: socket.socket, address: str) -> None:
        protocol = self._come(address)
        if protocol is None:
            sock.close()
            return
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._greet(sock, protocol))
        self._greeting.add(task)
        task.add_done_callback(functools.partial(self._greeted, sock, protocol))
        if self._context is not None:
            self._newcomers.enter(task)

    def _pause(self, listener: socket.socket) -> None:
        """Stops accepting for a moment. A client that cannot be accepted would wake us at once."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener.fileno())
        self._newcomers.cut_oldest()  # this may free the missing descriptor

        def go_on() -> None:
            if listener in self._listeners:
                loop.add_reader(listener.fileno(), self._accept, listener)

        loop.call_later(ACCEPT_PAUSE_S, go_on)

    async def _greet(self, sock: socket.socket, protocol: asyncio.Protocol) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: protocol,
            sock,
            ssl=self._context,
            ssl_handshake_timeout=None if self._context is None else self._timeout_s,
        )

    def _greeted(
        self, sock: socket.socket, protocol: asyncio.Protocol, task: asyncio.Task[None]
    ) -> None:
        self._greeting.discard(task)
        self._newcomers.leave(task)
        if task.cancelled():
            sock.close()  # needed if the task was cancelled before its first step
            self._failed(protocol)
        elif (error := task.exception()) is not None:
            self._failed(protocol)
            if isinstance(error, OSError):  # of the socket or of TLS: anybody can cause it
                log.debug("tls_refused", error=str(error))
            else:
                log.failure("listening_port_crashed", error)
