"""Sockets of data channels: opening, tuning, and the kernel's measurements of them.

Tests: tests/integration/test_transfer.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import struct
import threading
from typing import Any, NamedTuple, Protocol, TypeAlias

from kvmesh.core.errors import LostError
from kvmesh.core.types import Endpoint

_TCP_CONGESTION = 13
LONG_PATH_S = 0.005
"""Round trip in seconds from which a path is long: between datacentres, not inside one."""

_UNRESOLVED = (OSError, UnicodeError)
"""Exceptions of getaddrinfo; UnicodeError for names that cannot be host names."""
# struct tcp_info: 8 one-byte fields, then u32s; rtt is number 15 of them, total_retrans number 23.
_TCP_INFO_U32S = struct.Struct("<24I")
_RTT, _TOTAL_RETRANS = 15, 23


AddressInfo: TypeAlias = tuple[int, int, int, str, tuple[Any, ...]]
"""A result of getaddrinfo."""


class TcpFacts(NamedTuple):
    """Measurements of the kernel on a TCP connection."""

    rtt_s: float
    retransmits: int


def tune(sock: socket.socket) -> None:
    """Configures a data socket; call before connect or listen, whose children inherit it."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # BBR, the default of some hosts, paces short fast links to half their speed.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, b"cubic")


def suit_path(sock: socket.socket) -> None:
    """Chooses the congestion control of a connected data socket by the round trip of its handshake.

    On a long path CUBIC takes each lost packet for a full link: at 30 ms and 0.1 % loss a
    connection carries some ten Mbit/s. BBR goes by the rate at which packets arrive. The socket
    keeps CUBIC where the kernel has no BBR or does not allow it to this process.
    """
    if sock.family == socket.AF_UNIX:
        return
    facts = tcp_facts(sock)
    if facts is not None and facts.rtt_s >= LONG_PATH_S:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, b"bbr")


async def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket; port 0 takes a free one.

    Raises:
        OSError: the address cannot be bound.
    """
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = infos[0]
    sock = socket.socket(family, kind, protocol)
    try:
        tune(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


def listen_local(path: str) -> socket.socket:
    """Opens a listening Unix socket at `path`, which must not exist.

    Raises:
        OSError: the path cannot be bound.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        tune(sock)
        sock.bind(path)
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


async def connect(endpoint: Endpoint) -> socket.socket:
    """Connects to an endpoint.

    Raises:
        LostError: the endpoint does not answer.
    """
    loop = asyncio.get_running_loop()
    cause: OSError | None = None
    try:
        infos = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except _UNRESOLVED as error:
        raise LostError(f"data channel to {endpoint}: {error}") from error
    for family, kind, protocol, _, address in infos:
        try:
            return await _connected(socket.socket(family, kind, protocol), address)
        except OSError as error:
            cause = error
    raise LostError(f"data channel to {endpoint}: {cause}") from cause


def resolve_blocking(endpoint: Endpoint, timeout_s: float) -> AddressInfo:
    """Resolves an endpoint, for a thread that may block.

    A separate thread asks the resolver. With a silent name server it lives on until the resolver
    gives up.

    Raises:
        LostError: the name is unknown, or the resolver does not answer in time.
    """
    said: queue.SimpleQueue[AddressInfo | OSError | UnicodeError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
            said.put(infos[0])
        except _UNRESOLVED as error:
            said.put(error)

    threading.Thread(target=ask, name="kv-resolve", daemon=True).start()
    try:
        answer = said.get(timeout=timeout_s)
    except queue.Empty as error:
        text = f"data channel to {endpoint}: its name is not resolved in {timeout_s:g} s"
        raise LostError(text) from error
    if isinstance(answer, _UNRESOLVED):
        raise LostError(f"data channel to {endpoint}: {answer}") from answer
    return answer


async def connect_local(path: str) -> socket.socket:
    """Connects to a Unix socket.

    Raises:
        LostError: no server answers, or the path is not visible from here.
    """
    try:
        return await _connected(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), path)
    except OSError as error:
        raise LostError(f"data channel to {path}: {error}") from error


async def _connected(sock: socket.socket, address: str | tuple[object, ...]) -> socket.socket:
    connected = False
    try:
        tune(sock)
        await asyncio.get_running_loop().sock_connect(sock, address)
        suit_path(sock)
        connected = True
    finally:
        if not connected:
            sock.close()
    return sock


class HasOptions(Protocol):
    """A socket whose options `tcp_facts` reads."""

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """See `socket.getsockopt`."""
        ...


def tcp_facts(wire: HasOptions) -> TcpFacts | None:
    """Returns round trip and retransmits so far; None if the kernel does not support it."""
    try:
        info = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8 + _TCP_INFO_U32S.size)
    except OSError:
        return None
    numbers = _TCP_INFO_U32S.unpack_from(info, 8)
    return TcpFacts(numbers[_RTT] / 1e6, numbers[_TOTAL_RETRANS])


def local_endpoint(sock: socket.socket, host: str) -> Endpoint:
    """Returns the endpoint of a listening socket under the name `host`."""
    return Endpoint(host, int(sock.getsockname()[1]))
