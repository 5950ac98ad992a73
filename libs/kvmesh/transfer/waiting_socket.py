"""A connected socket on which the event loop waits and threads block, until it is cut.

The descriptor is in blocking mode for the threads; the loop passes MSG_DONTWAIT. A blocking call
ends by the socket's own timeout, a quarter of the stall time, so that a thread always notices that
its socket was cut. Tests: tests/integration/test_frame_socket.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from functools import partial

from kvmesh.core.errors import LostError
from kvmesh.transfer.native import NativeState
from kvmesh.transfer.pacing import Pacer, Share
from kvmesh.transfer.stall import StallWatch
from kvmesh.transfer.wire import Wire

DESCRIPTOR = struct.Struct("i")


class WaitingSocket:
    """Base of `FrameSocket`: the socket's life, waiting and timeouts, without frames.

    Attributes:
        wire: the socket, for `tcp_facts`.
        watch: cuts the socket on a stall; hold `watch.under_way()` while an answer is owed.
        received_fd: a descriptor that came over a Unix socket; belongs to the caller that takes it.
        has_stalled: it was cut because the peer made no progress; a new one would be no faster.
    """

    def __init__(self, wire: Wire, stall_timeout_s: float) -> None:
        self.wire = wire
        self.received_fd: int | None = None
        self._loop = asyncio.get_running_loop()
        self._cause: str | None = None
        self._is_watched = False
        self._reader: asyncio.Future[None] | None = None
        self._paused: asyncio.Future[None] | None = None
        self._paused_at = self._held_back_s = 0.0
        self._sending, self._receiving = NativeState(), NativeState()
        self._counted_bytes = 0
        self.has_stalled = False
        self.watch = StallWatch(
            stall_timeout_s,
            lambda: self._stall(f"no progress for {stall_timeout_s:g} s"),
            lambda: self._sending.moved + self._receiving.moved,
        )
        tick = struct.pack("ll", *divmod(max(1, int(stall_timeout_s * 250_000)), 1_000_000))
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        wire.setblocking(True)

    @property
    def moved_bytes(self) -> int:
        """Bytes sent and received since it was opened, by Python and by native calls."""
        return self._counted_bytes + self._sending.moved + self._receiving.moved

    @property
    def is_cut(self) -> bool:
        """Whether it can no longer send or receive."""
        return self._cause is not None

    @property
    def held_back_s(self) -> float:
        """Seconds since it was opened in which a sender waited for its budget."""
        waiting_s = 0.0 if self._paused is None else self._loop.time() - self._paused_at
        return self._held_back_s + waiting_s

    def cut(self, cause: str) -> None:
        """Ends the socket now: all waiting tasks and threads get LostError with this cause."""
        if self._cause is not None:
            return
        self._cause = cause
        self._sending.stop = self._receiving.stop = 1
        if self._paused is not None:
            _wake(self._paused)
        # Wakes both directions, threads included.
        with contextlib.suppress(OSError):
            self.wire.shutdown(socket.SHUT_RDWR)

    def _stall(self, cause: str) -> None:
        self.has_stalled = self._cause is None
        self.cut(cause)

    def close(self) -> None:
        """Frees the socket; nothing may wait on it. May be called again."""
        self.watch.close()
        self._unwatch()
        if self._cause is not None:
            # Queued bytes are useless now: reset the connection instead of lingering.
            with contextlib.suppress(OSError):
                linger = struct.pack("ii", 1, 0)
                self.wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.wire.close()
        if self.received_fd is not None:
            os.close(self.received_fd)
            self.received_fd = None

    async def _turn(self, pacer: Pacer, num_bytes: int, share: Share) -> None:
        """Waits for permission to send; raises LostError as soon as the socket is cut."""
        self._raise_if_cut()
        self._paused, self._paused_at = self._loop.create_future(), self._loop.time()
        ticket = pacer.ask(num_bytes, share, partial(_wake, self._paused))
        try:
            await self._paused
        finally:
            pacer.withdraw(ticket)
            self._held_back_s = self.held_back_s
            self._paused = None
        self._raise_if_cut()

    async def _writable(self) -> None:
        fd = self.wire.fileno()
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(fd, _wake, ready)
        self._stay_blocking()
        try:
            await ready
        finally:
            self._loop.remove_writer(fd)

    async def _readable(self) -> None:
        # Stays registered between calls: adding and removing it costs a tenth of a small frame.
        if not self._is_watched:
            self._watch(self._on_readable)
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _on_readable(self) -> None:
        if self._reader is not None:
            _wake(self._reader)
        else:
            self._unwatch()

    def _watch(self, on_readable: Callable[[], None]) -> None:
        self._is_watched = True
        self._loop.add_reader(self.wire.fileno(), on_readable)
        self._stay_blocking()

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self.wire.fileno())

    def _stay_blocking(self) -> None:
        # Some loops (libuv) make watched descriptors non-blocking: threads would spin on them.
        self.wire.setblocking(True)

    def _take_fd(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level != socket.SOL_SOCKET or kind != socket.SCM_RIGHTS:
                continue
            whole = len(data) - len(data) % DESCRIPTOR.size
            for (fd,) in DESCRIPTOR.iter_unpack(data[:whole]):
                if self.received_fd is None:
                    self.received_fd = fd
                else:
                    os.close(fd)

    def _raise_if_cut(self) -> None:
        if self._cause is not None:
            raise self._lost("cut")

    def _lost(self, what: object) -> LostError:
        return LostError(f"data channel: {self._cause or what}")


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
