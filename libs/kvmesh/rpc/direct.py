"""Moves a stream's messages to a separate socket, which the gRPC stream guards.

gRPC opens the stream: it authenticates, notices dead peers, and carries the offer (a port and a
token) in its metadata. If the client reaches that port, messages travel there as frames, without
HTTP/2 and without gRPC's threads: a question and its answer cost a fifth. If not, they stay on
gRPC. The end of the stream or of the socket ends both. Tests: tests/integration/test_rpc_direct.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from kvmesh.core.errors import ConfigError, ProtocolError
from kvmesh.core.newcomers import Newcomers
from kvmesh.core.open_files import most_open_files
from kvmesh.rpc.channels import MAX_MESSAGE_BYTES, PeerTls, TlsConfig
from kvmesh.rpc.framed import FramedConnection, ignore
from kvmesh.rpc.listening_port import ListeningPort
from kvmesh.rpc.tls import client_context, server_context
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

OFFER_KEY = "kvmesh-direct"
"""Metadata of a stream's answer: port, token, and optionally the host, separated by blanks."""

LOCAL_KEY = "kvmesh-direct-local"
"""Metadata of a stream's answer: the abstract Unix socket for clients on the same host."""

CONNECT_TIMEOUT_S = 1.0
"""Seconds to connect to an offered port.

If it does not answer, as behind a proxy, the stream stays on gRPC.
"""

MOST_OPEN_SHARE = 0.4
"""Largest fraction of the files that a process may open which direct connections take.

Each has a gRPC connection beside it. Further streams stay on gRPC.
"""

_TOKEN_BYTES = 16
_GREETING_S = 5.0
_LAST_BYTES_S = 1.0


@dataclass(eq=False, slots=True)
class DirectOffer:
    """One stream's offer of a connection. Call `withdraw` when the stream ends.

    Attributes:
        metadata: for the stream's initial metadata.
        connection: the client's connection, after it arrived.
    """

    listener: DirectListener
    token: bytes
    on_frame: Callable[[bytes], None]
    on_connected: Callable[[FramedConnection], None]
    metadata: tuple[tuple[str, str], ...] = ()
    connection: FramedConnection | None = None

    @property
    def failure(self) -> ProtocolError | None:
        """The error of an unreadable message from the client; None without one."""
        return None if self.connection is None else self.connection.failure

    def hold_reading(self, held: bool) -> None:
        """Stops reading from the client, or continues."""
        if self.connection is not None:
            self.connection.hold_reading(held)

    def withdraw(self) -> None:
        """Ends the connection, or the wait for it. May be called again."""
        self.listener.forget(self.token)
        if self.connection is not None:
            self.connection.on_frame = ignore  # later messages have no stream any more
            self.connection.close()


@dataclass(slots=True)
class DirectListener:
    """The port of a service's direct streams.

    Attributes:
        advertise_host: host at which this process is reached; empty for the host of its gRPC port.
        port: bound port; 0 before `start` and if there is none.
        local_name: name of the Unix socket for clients on this host, where a message costs a third
            of one over loopback TCP; empty if there is none.
    """

    host: str = "127.0.0.1"
    wanted_port: int = 0
    tls: TlsConfig | None = None
    advertise_host: str = ""
    port: int = 0
    local_name: str = ""
    _offers: dict[bytes, DirectOffer] = field(default_factory=dict)
    _open: set[FramedConnection] = field(default_factory=set)
    _newcomers: Newcomers[FramedConnection] = field(
        default_factory=lambda: Newcomers(FramedConnection.abort)
    )
    _most_open: int = field(default_factory=lambda: int(MOST_OPEN_SHARE * most_open_files()))
    _server: asyncio.Server | ListeningPort | None = None
    _local_server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens, unless the wanted port is negative.

        Raises:
            ConfigError: the port is taken.
        """
        if self.wanted_port < 0 or self._server is not None:
            return
        # Encrypted if and only if the gRPC port is.
        tls = self.tls
        context = server_context(tls, "server.tls") if tls is not None and tls.cert else None
        try:
            await self._listen(context)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self.host}:{self.wanted_port}; choose another with "
                "--server.direct-port"
            ) from error
        if context is None:  # a Unix socket would bypass the encryption
            await self._listen_locally()

    async def _listen(self, context: ssl.SSLContext | None) -> None:
        if context is not None:
            self._server = ListeningPort(context, _GREETING_S, lambda _: self._connection())
            self.port = await self._server.start(self.host, self.wanted_port)
            return
        loop = asyncio.get_running_loop()
        plain = await loop.create_server(self._connection, self.host, self.wanted_port)
        self._server = plain
        self.port = plain.sockets[0].getsockname()[1]

    async def _listen_locally(self) -> None:
        """Listens for clients on this host. Others, which do not see the socket, use the port."""
        name = f"kvmesh-{secrets.token_hex(_TOKEN_BYTES)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(f"\0{name}")
        except OSError as error:  # this system has no abstract names
            sock.close()
            log.info("no_local_socket", error=str(error))
            return
        loop = asyncio.get_running_loop()
        self._local_server = await loop.create_unix_server(self._connection, sock=sock)
        self.local_name = name

    @property
    def num_offers(self) -> int:
        """Number of streams that wait for their client's connection."""
        return len(self._offers)

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def offer(
        self,
        on_frame: Callable[[bytes], None],
        on_connected: Callable[[FramedConnection], None],
    ) -> DirectOffer:
        """Offers a connection to one stream's client.

        The offer is empty without a port, and while too many connections are open.

        Args:
            on_frame: called with each message's bytes.
            on_connected: called before the first message.
        """
        token = secrets.token_bytes(_TOKEN_BYTES)
        offer = DirectOffer(self, token, on_frame, on_connected)
        if self.port and len(self._offers) + len(self._open) < self._most_open:
            words = f"{self.port} {token.hex()} {self.advertise_host}"
            offer.metadata = ((OFFER_KEY, words.strip()),)
            if self.local_name:
                offer.metadata += ((LOCAL_KEY, self.local_name),)
            self._offers[token] = offer
        return offer

    def forget(self, token: bytes) -> None:
        """Stops waiting for an offer's client."""
        self._offers.pop(token, None)

    async def close(self) -> None:
        """Stops listening and ends all connections. May be called again."""
        for server in (self._server, self._local_server):
            if server is not None:
                server.close()
        for connection in tuple(self._open):
            connection.close()
        if self._open:
            await asyncio.wait({each.closed for each in self._open}, timeout=_LAST_BYTES_S)
        for connection in tuple(self._open):
            connection.abort()

    def _connection(self) -> FramedConnection:
        loop = asyncio.get_running_loop()

        def greeted(token: bytes) -> None:
            timers[0].cancel()
            self._newcomers.leave(connection)
            offer = self._offers.pop(token, None)
            if offer is None:
                raise ProtocolError("unknown_token", "no stream waits for this connection")
            connection.max_bytes = MAX_MESSAGE_BYTES
            connection.on_frame = offer.on_frame
            offer.connection = connection
            offer.on_connected(connection)
            connection.greet(b"")

        def ended(_: asyncio.Future[str]) -> None:
            timers.pop().cancel()
            self._open.discard(connection)
            self._newcomers.leave(connection)

        def made() -> None:
            timers.append(loop.call_later(_GREETING_S, connection.abort))
            connection.closed.add_done_callback(ended)
            self._open.add(connection)
            self._newcomers.enter(connection)

        timers: list[asyncio.TimerHandle] = []
        connection = FramedConnection(greeted, _TOKEN_BYTES)
        connection.on_made = made
        return connection


@dataclass(frozen=True, slots=True)
class DirectClient:
    """Accepts offers on the client's side.

    Attributes:
        host: host of the service.
        response_type: class of the service's messages.
    """

    host: str
    response_type: type[Message]
    tls: PeerTls | None = None

    @classmethod
    def of(
        cls, target: str, response_type: type[Message], tls: PeerTls | None = None
    ) -> DirectClient:
        """Makes the client for a service at `host:port`."""
        host = target.rpartition(":")[0].strip("[]")
        return cls(host, response_type, tls)

    async def connect(
        self, offer: str, on_message: Callable[[Any], None], local_name: str = ""
    ) -> FramedConnection | None:
        """Accepts an offer; returns None if its port cannot be reached.

        Args:
            local_name: Unix socket that is tried first.
            on_message: called for each message of the service, on the event loop; must not block.
        """
        port, token, *hosts = offer.split(" ")
        host = hosts[0] if hosts else self.host
        parse = self.response_type.FromString
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[None] = loop.create_future()

        def first(_: bytes) -> None:
            connection.max_bytes = MAX_MESSAGE_BYTES
            connection.on_frame = lambda frame: on_message(parse(frame))
            if not answered.done():
                answered.set_result(None)

        connection = FramedConnection(first, 0)
        tls = self.tls or PeerTls()
        context = client_context(tls, "tls")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                local = _local_socket(local_name) if context is None else None
                if local is not None:
                    await loop.create_unix_connection(lambda: connection, sock=local)
                else:
                    # Certificates are for the name under which clients know the service.
                    name = None if context is None else tls.peer_name or self.host
                    await loop.create_connection(
                        lambda: connection, host, int(port), ssl=context, server_hostname=name
                    )
                connection.greet(bytes.fromhex(token))
                ends: set[asyncio.Future[Any]] = {answered, connection.closed}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, ValueError, TimeoutError) as error:
            log.info("stays_on_grpc", host=host, port=port, error=str(error) or "no answer")
        if not answered.done() or connection.closed.done():
            connection.abort()
            return None
        return connection


def _local_socket(name: str) -> socket.socket | None:
    """Connects to an abstract Unix socket; None if it is not on this host."""
    if not name:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(f"\0{name}")  # connects immediately or fails
    except OSError:
        sock.close()
        return None
    return sock


async def wait_for_last_bytes(connection: FramedConnection) -> None:
    """Waits until the messages have arrived that the peer sent before it ended the stream."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_BYTES_S):
            await asyncio.shield(connection.closed)
