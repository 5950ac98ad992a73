"""A connected socket that sends frames: heads on the event loop, large payloads in threads.

Tests: tests/integration/test_transfer_receivers.py, tests/integration/test_given_up.py.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial

from kvmesh.transfer.checksums import is_crc32c, sum_of
from kvmesh.transfer.codec import TRAILER
from kvmesh.transfer.cursor import MAX_BUFFERS, ViewCursor
from kvmesh.transfer.decoder import Sum
from kvmesh.transfer.native import NativeIo, load_native, num_bytes_of, ranges_of
from kvmesh.transfer.pacing import Pacer, Share
from kvmesh.transfer.threads import run_to_end
from kvmesh.transfer.waiting_socket import DESCRIPTOR, WaitingSocket
from kvmesh.transfer.wire import Wire

PIECE_BYTES = 1 << 20
"""Maximum bytes that one socket call moves."""
INLINE_BYTES = 256 << 10
"""Payloads up to this many bytes stay on the loop: two thread switches would cost more."""
NOW = socket.MSG_DONTWAIT


class SendingSocket(WaitingSocket):
    """The sending half of a frame socket; one writer at a time.

    Attributes:
        lends: send large payloads zero-copy; their memory must stay unchanged until the answer.
    """

    def __init__(self, wire: Wire, stall_timeout_s: float, senders: Executor) -> None:
        """Sends nothing yet; `senders` are the threads that send large payloads."""
        super().__init__(wire, stall_timeout_s)
        self.lends = False
        self._senders = senders
        self._has_begun = False  # whether part of the current frame has left
        # Native calls count the bytes that they move in `_sending`; TLS has no native calls.
        self._native = load_native() if isinstance(wire, socket.socket) else None

    async def send(self, head: bytes, fd: int | None = None) -> None:
        """Sends a frame without payload, with a descriptor if one is given.

        If cancelled it cuts the socket, unless nothing of the frame has left.

        Raises:
            LostError: the socket failed or was cut.
        """
        self._has_begun = False
        if fd is not None:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, DESCRIPTOR.pack(fd))
            await self._send_rest(ViewCursor([memoryview(head)]), [rights])
            return
        count = self._send_at_once([head], [])
        if count < len(head):
            await self._send_rest(ViewCursor([memoryview(head)[count:]]), [])

    async def send_payload(
        self,
        head: bytes,
        views: Sequence[memoryview],
        sum_: Sum | None,
        pacer: Pacer | None,
        share: Share = Share.HANDOFF,
    ) -> None:
        """Sends a frame with its payload and, with `sum_`, its checksum.

        If cancelled it cuts the socket, unless nothing of the frame has left: a sender that only
        waits for a budget does not end other transfers. In any case `views` are not read after it
        ended, or with `lends` after the answer.

        Args:
            pacer: budget of the payload; None for no limit.
            share: priority within the budget.

        Raises:
            LostError: the socket failed or was cut.
        """
        num_bytes = num_bytes_of(views)
        self._has_begun = False
        if pacer is not None and num_bytes > min(INLINE_BYTES, pacer.piece(share)):
            try:
                await self._send_paced(head, views, sum_, pacer, share)
            except asyncio.CancelledError:
                self._cut_if_begun()
                raise
            return
        if num_bytes <= INLINE_BYTES:
            if pacer is not None:
                await self._turn(pacer, num_bytes, share)
            buffers = [memoryview(head), *views]
            if sum_ is not None:
                buffers.append(memoryview(TRAILER.pack(sum_of(views, sum_, 0))))
                num_bytes += TRAILER.size
            count = self._send_at_once(buffers[:MAX_BUFFERS], [])
            if count < len(head) + num_bytes:
                cursor = ViewCursor(buffers)
                cursor.advance(count)
                await self._send_rest(cursor, [])
            return
        with self.watch.under_way():
            work = partial(self._send_in_thread, head, views, sum_)
            await self._in_thread(self._senders, work)

    async def _send_paced(
        self,
        head: bytes,
        views: Sequence[memoryview],
        sum_: Sum | None,
        pacer: Pacer,
        share: Share,
    ) -> None:
        """Sends piece by piece, each in its turn; holds no thread while it waits."""
        cursor, value, first = ViewCursor(views), 0, [memoryview(head)]
        while batch := cursor.batch(pacer.piece(share)):
            num_bytes = sum(len(view) for view in batch)
            await self._turn(pacer, num_bytes, share)
            if num_bytes > INLINE_BYTES:
                self._has_begun = True
                work = partial(self._push_summed, [*first, *batch], batch, sum_, value)
                with self.watch.under_way():
                    value = await run_to_end(self._senders, work, self._cut_in_the_middle)
            else:
                value = 0 if sum_ is None else sum_of(batch, sum_, value)
                await self._send_rest(ViewCursor([*first, *batch]), [])
            first = []
            cursor.advance(num_bytes)
        if sum_ is not None:
            await self._send_rest(ViewCursor([memoryview(TRAILER.pack(value))]), [])

    def _send_at_once(
        self, buffers: Iterable[memoryview | bytes], ancillary: list[tuple[int, int, bytes]]
    ) -> int:
        """Sends without waiting; returns the number of bytes sent, 0 if the socket is full."""
        try:
            count = self.wire.sendmsg(buffers, ancillary, NOW)
        except BlockingIOError:
            self._raise_if_cut()
            return 0
        except OSError as error:
            raise self._lost(error) from error
        self.watch.progress()
        self._has_begun = True
        self._counted_bytes += count
        return count

    async def _send_rest(self, cursor: ViewCursor, ancillary: list[tuple[int, int, bytes]]) -> None:
        with self.watch.under_way():
            while not cursor.at_end:
                count = self._send_at_once(cursor.batch(PIECE_BYTES), ancillary)
                if count == 0:
                    try:
                        await self._writable()
                    except asyncio.CancelledError:
                        self._cut_if_begun()
                        raise
                    continue
                cursor.advance(count)
                ancillary = []

    def _send_in_thread(self, head: bytes, views: Sequence[memoryview], sum_: Sum | None) -> None:
        self._push([memoryview(head)])
        if (native := self._native_for(sum_)) is not None:
            self._raise_if_cut()
            try:
                ranges, has_sum = ranges_of(views), sum_ is not None
                value = native.send(
                    self.wire.fileno(), ranges, self._sending, has_sum=has_sum, lends=self.lends
                )
            except OSError as error:
                raise self._lost(error) from error
            if sum_ is not None:
                self._push([memoryview(TRAILER.pack(value))])
            return
        cursor, value = ViewCursor(views), 0
        while batch := cursor.batch(PIECE_BYTES):
            value = self._push_summed(batch, batch, sum_, value)
            cursor.advance(sum(len(view) for view in batch))
        if sum_ is not None:
            self._push([memoryview(TRAILER.pack(value))])

    def _push_summed(
        self, buffers: list[memoryview], batch: list[memoryview], sum_: Sum | None, value: int
    ) -> int:
        """Sends buffers; returns the running sum including `batch`, their payload part."""
        if sum_ is not None:
            value = sum_of(batch, sum_, value)
        self._push(buffers)
        return value

    def _push(self, batch: list[memoryview]) -> None:
        cursor = ViewCursor(batch)
        while batch:
            self._raise_if_cut()
            try:
                count = self.wire.sendmsg(batch, [], 0)
            except BlockingIOError:  # the socket's timeout: check whether it was cut, go on
                continue
            except OSError as error:
                raise self._lost(error) from error
            self.watch.progress()
            self._counted_bytes += count
            cursor.advance(count)
            batch = cursor.batch(PIECE_BYTES)

    def _native_for(self, sum_: Sum | None) -> NativeIo | None:
        """Returns the native calls if they are available and compute this sum."""
        if self._native is None or sum_ is None:
            return self._native
        return self._native if is_crc32c(sum_) and self._native.has_crc32c else None

    async def _in_thread(self, threads: Executor, work: Callable[[], None]) -> None:
        await run_to_end(threads, work, self._cut_in_the_middle)

    def _cut_if_begun(self) -> None:
        if self._has_begun:
            self._cut_in_the_middle()

    def _cut_in_the_middle(self) -> None:
        self.cut("a frame was cut in the middle")
