"""Non-blocking TCP sockets: tuning, stall detection, frames in and raw pieces out.

The only module that moves bytes, so the place where TLS would wrap a socket. asyncio transports
are not used: they copy large writes. Tests: tests/integration/test_transfer.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import Callable, Iterator, Sequence

from kvmesh.core.errors import LostError
from kvmesh.core.types import Endpoint
from kvmesh.transfer.decoder import FrameDecoder, PayloadBytes, PayloadEnd, PayloadStart
from kvmesh.transfer.frames import Frame

PIECE_BYTES = 1 << 20
"""Most that one socket call moves; stalls are noticed piece by piece."""
_YIELD_BYTES = 2 << 20
_SCRATCH_BYTES = 256 << 10
_STALL_TICKS = 4
_TCP_CONGESTION = 13


def tune(sock: socket.socket) -> None:
    """Settings of a data socket; call before connect or listen, whose children inherit them."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # BBR, the default of some hosts, paces short fast links to half their speed.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, b"cubic")


async def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

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


async def connect(endpoint: Endpoint) -> socket.socket:
    """A connected socket.

    Raises:
        LostError: nobody answers at the endpoint.
    """
    loop = asyncio.get_running_loop()
    cause: OSError | None = None
    try:
        infos = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LostError(f"data channel to {endpoint}: {error}") from error
    for family, kind, protocol, _, address in infos:
        sock = socket.socket(family, kind, protocol)
        connected = False
        try:
            tune(sock)
            await loop.sock_connect(sock, address)
            connected = True
        except OSError as error:
            cause = error
        finally:
            if not connected:
                sock.close()
        if connected:
            return sock
    raise LostError(f"data channel to {endpoint}: {cause}") from cause


class StallWatch:
    """Calls back when something is under way and nothing has moved for `timeout_s`.

    Time is counted in ticks of a quarter of it: a loop that was blocked for long ticks once, so a
    busy process does not take its own pause for the peer's.
    """

    def __init__(self, timeout_s: float, on_stall: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._tick_s = timeout_s / _STALL_TICKS
        self._on_stall = on_stall
        self._under_way = 0
        self._idle_ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """While inside, progress is expected."""
        if self._under_way == 0:
            self.progress()
        self._under_way += 1
        if self._timer is None:
            self._timer = self._loop.call_later(self._tick_s, self._tick)
        try:
            yield
        finally:
            self._under_way -= 1

    def progress(self) -> None:
        """Something moved."""
        self._idle_ticks = 0

    def close(self) -> None:
        """No more callbacks. May be called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        if self._under_way == 0:
            return
        self._idle_ticks += 1
        # The first tick after progress is not a whole one.
        if self._idle_ticks > _STALL_TICKS:
            self._on_stall()
        else:
            self._timer = self._loop.call_later(self._tick_s, self._tick)


class FrameSocket:
    """A connected socket that speaks frames: one reader at a time, one writer at a time.

    Attributes:
        watch: stalls cut the socket; hold `watch.under_way()` while an answer is owed.
    """

    def __init__(self, sock: socket.socket, block_bytes: int, stall_timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._decoder = FrameDecoder(block_bytes)
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._moved_bytes = 0
        self._cause: str | None = None
        self.watch = StallWatch(
            stall_timeout_s, lambda: self.cut(f"no progress for {stall_timeout_s:g} s")
        )

    async def send(self, *buffers: bytes | memoryview) -> None:
        """Sends buffers in order, in pieces.

        Raises:
            LostError: the socket failed or was cut.
        """
        with self.watch.under_way():
            for buffer in buffers:
                view = memoryview(buffer)
                for start in range(0, len(view), PIECE_BYTES):
                    piece = view[start : start + PIECE_BYTES]
                    try:
                        await self._loop.sock_sendall(self._sock, piece)
                    except OSError as error:
                        raise self._lost(error) from error
                    await self._moved(len(piece))

    async def receive(self) -> Frame | PayloadStart | None:
        """The next frame; None when the peer closed between two frames.

        Raises:
            LostError: the socket failed, was cut, or ended within a frame.
            ProtocolError: the peer broke the frame format.
        """
        while True:
            # Never more than wanted: the bytes of a payload stay in the socket.
            piece = self._scratch[: self._decoder.wanted]
            if self._decoder.at_boundary:
                count = await self._receive_some(piece)
            else:
                with self.watch.under_way():
                    count = await self._receive_some(piece)
            if count == 0:
                if self._decoder.at_boundary and self._cause is None:
                    return None
                raise self._lost("closed by the peer")
            for event in self._decoder.feed(piece[:count]):
                assert not isinstance(event, PayloadBytes | PayloadEnd), "read the payload first"
                return event

    async def receive_payload(self, views: Sequence[memoryview]) -> bool:
        """Reads the announced payload straight into `views`; returns whether it is intact.

        Raises:
            LostError: as `receive`.
        """
        return await self._payload(iter(views))

    async def drop_payload(self) -> bool:
        """Reads the announced payload away; returns whether it was intact."""
        return await self._payload(itertools.repeat(self._scratch))

    async def _payload(self, views: Iterator[memoryview]) -> bool:
        view = memoryview(b"")
        with self.watch.under_way():
            while True:
                in_payload = self._decoder.in_payload
                while in_payload and not view:
                    view = next(views)
                room = view if in_payload else self._scratch
                piece = room[: min(self._decoder.wanted, PIECE_BYTES)]
                count = await self._receive_some(piece)
                if count == 0:
                    raise self._lost("closed by the peer")
                if in_payload:
                    view = view[count:]
                for event in self._decoder.feed(piece[:count]):
                    if isinstance(event, PayloadEnd):
                        return event.intact

    def cut(self, cause: str) -> None:
        """Ends the socket now: whoever waits on it gets LostError with this cause."""
        if self._cause is not None:
            return
        self._cause = cause
        # Wakes both directions; memory of a send under way is not read again.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the socket; nobody may wait on it. May be called again."""
        self.watch.close()
        if self._cause is not None:
            # What is still queued is of no use: reset instead of lingering.
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()

    async def _receive_some(self, view: memoryview) -> int:
        try:
            count = await self._loop.sock_recv_into(self._sock, view)
        except OSError as error:
            raise self._lost(error) from error
        await self._moved(count)
        return count

    async def _moved(self, count: int) -> None:
        self.watch.progress()
        # Socket calls that need not wait do not yield; others on this loop want their turn.
        self._moved_bytes += count
        if self._moved_bytes >= _YIELD_BYTES:
            self._moved_bytes = 0
            await asyncio.sleep(0)

    def _lost(self, what: object) -> LostError:
        return LostError(f"data channel: {self._cause or what}")


def local_endpoint(sock: socket.socket, host: str) -> Endpoint:
    """Where a listening socket is reached under `host`."""
    return Endpoint(host, int(sock.getsockname()[1]))
