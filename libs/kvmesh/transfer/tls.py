"""TLS around a data socket, in the shape that `FrameSocket` uses. Costs a copy on each side.

Both directions share one TLS object, so a lock is held while it encrypts or decrypts in memory, but
never during a socket call. Tests: tests/contract/test_channels.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from kvmesh.core.errors import LostError
from kvmesh.core.types import Endpoint
from kvmesh.transfer.sockets import connect
from kvmesh.transfer.wire import Wire

_CIPHER_BYTES = 256 << 10
_PLAIN_BYTES = 256 << 10
_LEAST_S = 1e-3
"""Minimum timeout of a socket in seconds; zero would make it non-blocking."""


class WrongPeerError(LostError):
    """The other end has a certificate of the mesh, but its name is not an allowed peer."""


Ancillary = list[tuple[int, int, bytes]]


@dataclass(frozen=True, slots=True)
class DataTls:
    """TLS settings of one end.

    Attributes:
        context: certificate of this end and the authorities it trusts.
        peers: certificate names that the other end may have; empty allows all trusted ones.
        peer_name: name for which a server's certificate is; empty: its address.
    """

    context: ssl.SSLContext
    peers: frozenset[str] = frozenset()
    peer_name: str = ""


class TlsWire:
    """An encrypted connection; reading and writing may run in two threads at once."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None
    ) -> None:
        """Prepares TLS; no server name means the server's end. Call `handshake` next."""
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_name is None,
            server_hostname=server_name,
        )
        self._lock = threading.Lock()
        self._limit_s = math.inf
        self._cipher_in = memoryview(bytearray(_CIPHER_BYTES))
        # Ciphertext that the socket has not taken, and the number of plaintext bytes it encodes.
        self._cipher_out = memoryview(b"")
        self._plain_out = 0

    async def handshake(self) -> None:
        """Runs the TLS handshake; the socket must be non-blocking.

        Raises:
            LostError: the peer does not speak TLS, or its certificate is not accepted.
        """
        loop = asyncio.get_running_loop()
        with _lost_handshake():
            for said, listens in self._greetings():
                if said:
                    await loop.sock_sendall(self._sock, said)
                if listens:
                    self._hear(await loop.sock_recv_into(self._sock, self._cipher_in))

    def handshake_blocking(self) -> None:
        """Variant of `handshake` for a blocking socket; its timeout limits the whole handshake."""
        timeout_s = self._sock.gettimeout()
        assert timeout_s, "a peer that says nothing is not waited for without end"
        deadline = monotonic() + timeout_s
        with _lost_handshake():
            for said, listens in self._greetings():
                if said:
                    self._sock.sendall(said)
                if listens:
                    # A peer that sends byte by byte must finish in time as well.
                    self._sock.settimeout(max(deadline - monotonic(), _LEAST_S))
                    self._hear(self._sock.recv_into(self._cipher_in))

    def _greetings(self) -> Iterator[tuple[bytes, bool]]:
        """Yields the bytes to send in the handshake, and whether a reply must be read next."""
        listens = True
        while listens:
            try:
                self._tls.do_handshake()
                listens = False
            except ssl.SSLWantReadError:
                pass
            yield self._outgoing.read(), listens

    def _hear(self, count: int) -> None:
        if count == 0:
            raise LostError("data channel: closed in the TLS handshake")
        self._incoming.write(self._cipher_in[:count])

    def peer_name(self) -> str:
        """Returns the common name in the other end's certificate; empty without a certificate."""
        return common_name(self._tls.getpeercert())

    def sendmsg(self, buffers: Iterable[memoryview | bytes], ancdata: Ancillary, flags: int) -> int:
        """Sends some plaintext; after BlockingIOError call again with the same bytes."""
        assert not ancdata, "descriptors go over Unix sockets"
        if not self._cipher_out:
            self._plain_out = self._encrypt(buffers)
        while self._cipher_out:
            count = self._sock.send(self._cipher_out, flags)
            self._cipher_out = self._cipher_out[count:]
        return self._plain_out

    def recvmsg_into(
        self, buffers: Iterable[memoryview], ancbufsize: int, flags: int
    ) -> tuple[int, Ancillary, int, object]:
        """Receives some plaintext into the first buffer.

        Raises:
            BlockingIOError: there is none yet, or none came within the socket's time limit.
        """
        target = next(iter(buffers))
        deadline = monotonic() + self._limit_s
        while True:
            count = self._decrypt(target)
            if count is not None:
                return count, [], 0, None
            if monotonic() > deadline:  # a record that arrives byte by byte
                raise BlockingIOError
            arrived = self._sock.recv_into(self._cipher_in, 0, flags & ~socket.MSG_WAITALL)
            with self._lock:
                if arrived:
                    self._incoming.write(self._cipher_in[:arrived])
                else:
                    self._incoming.write_eof()

    def fileno(self) -> int:
        """See `Wire`."""
        return self._sock.fileno()

    def shutdown(self, how: int) -> None:
        """See `Wire`; sends no TLS close_notify, since frames mark their own ends."""
        self._sock.shutdown(how)

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        """See `Wire`; a receive timeout limits the time to the next plaintext."""
        self._sock.setsockopt(level, option, value)
        if (level, option) == (socket.SOL_SOCKET, socket.SO_RCVTIMEO):
            seconds, microseconds = struct.unpack("ll", value)
            self._limit_s = seconds + microseconds / 1e6

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """See `Wire`."""
        return self._sock.getsockopt(level, option, size)

    def setblocking(self, flag: bool) -> None:
        """See `Wire`."""
        self._sock.setblocking(flag)

    def close(self) -> None:
        """See `Wire`."""
        self._sock.close()

    def _encrypt(self, buffers: Iterable[memoryview | bytes]) -> int:
        taken = 0
        with self._lock:
            for buffer in buffers:
                view = memoryview(buffer)[: _PLAIN_BYTES - taken]
                while view:
                    count = self._tls.write(view)
                    view, taken = view[count:], taken + count
                if taken == _PLAIN_BYTES:
                    break
            self._cipher_out = memoryview(self._outgoing.read())
        return taken

    def _decrypt(self, target: memoryview) -> int | None:
        """Returns the plaintext bytes put into `target`; None if input is missing, 0 at the end."""
        with self._lock:
            try:
                count: object = self._tls.read(len(target), target)
                assert isinstance(count, int), "reading into a buffer gives a count"
                return count
            except ssl.SSLWantReadError:
                return None
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return 0


@contextlib.contextmanager
def _lost_handshake() -> Iterator[None]:
    """Turns errors of a handshake into LostError with the cause."""
    try:
        yield
    except OSError as error:  # from the socket or from TLS
        raise LostError(f"data channel: {error}") from error


async def connect_wire(endpoint: Endpoint, tls: DataTls | None) -> Wire:
    """Connects to an endpoint; without `tls` the connection is plain.

    Raises:
        LostError: the endpoint does not answer, or the handshake fails.
    """
    sock = await connect(endpoint)
    if tls is None:
        return sock
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(sock.close)
        wire = await connect_tls(sock, tls, endpoint.host)
        on_failure.pop_all()
    return wire


async def connect_tls(sock: socket.socket, tls: DataTls, host: str) -> TlsWire:
    """Wraps the client's end and completes its handshake.

    Raises:
        LostError: as `TlsWire.handshake`, or the other end is not an allowed peer.
    """
    return await _greeted(TlsWire(sock, tls.context, tls.peer_name or host), tls.peers)


async def accept_tls(sock: socket.socket, tls: DataTls) -> TlsWire:
    """Wraps the server's end and completes its handshake.

    Raises:
        LostError: as `connect_tls`; `WrongPeerError` if the other end is not an allowed peer.
    """
    return await _greeted(TlsWire(sock, tls.context, None), tls.peers)


async def _greeted(wire: TlsWire, peers: frozenset[str]) -> TlsWire:
    await wire.handshake()
    check_peer(wire.peer_name(), peers)
    return wire


def connect_tls_blocking(sock: socket.socket, tls: DataTls, host: str) -> TlsWire:
    """Variant of `connect_tls` for a blocking socket; closes the socket on failure."""
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(sock.close)
        wire = TlsWire(sock, tls.context, tls.peer_name or host)
        wire.handshake_blocking()
        check_peer(wire.peer_name(), tls.peers)
        on_failure.pop_all()
    return wire


def common_name(certificate: Mapping[str, Any] | None) -> str:
    """Returns the common name in a certificate; empty without one.

    Args:
        certificate: as `ssl.SSLSocket.getpeercert` returns it.
    """
    shown = certificate or {}
    fields = (field for entry in shown.get("subject", ()) for field in entry)
    return next((str(value) for key, value in fields if key == "commonName"), "")


def check_peer(name: str, peers: frozenset[str]) -> None:
    """Checks the name in the other end's certificate.

    Raises:
        WrongPeerError: there are allowed peers, and it is none of them.
    """
    if peers and name not in peers:
        raise WrongPeerError(f"data channel: {name or 'nobody'} is no peer of this worker")
