"""A connected socket that speaks frames: heads on the event loop, large payloads in threads.

Tests: tests/integration/test_transfer.py.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from time import monotonic

from kvmesh.core.errors import LostError, ProtocolError
from kvmesh.transfer.checksums import is_crc32c, sum_of
from kvmesh.transfer.codec import TRAILER
from kvmesh.transfer.cursor import MAX_BUFFERS, ViewCursor
from kvmesh.transfer.decoder import (
    FrameDecoder,
    FrameEvent,
    PayloadBytes,
    PayloadEnd,
    PayloadStart,
    Sum,
)
from kvmesh.transfer.frames import Frame
from kvmesh.transfer.native import NativeIo, load_native, num_bytes_of, ranges_of
from kvmesh.transfer.pacing import Pacer, Share
from kvmesh.transfer.polling import Polling
from kvmesh.transfer.threads import run_to_end
from kvmesh.transfer.waiting_socket import DESCRIPTOR, WaitingSocket
from kvmesh.transfer.wire import Wire

PIECE_BYTES = 1 << 20
"""Most that one socket call moves."""
INLINE_BYTES = 256 << 10
"""Payloads up to this size stay on the loop: two changes of thread would cost more."""
_SCRATCH_BYTES = 256 << 10
_ALONE_S = 1e-3
"""Frames that are looked for one after the other keep the loop so long, and a look, at most."""
_NOW = socket.MSG_DONTWAIT


class FrameSocket(WaitingSocket):
    """One reader at a time, one writer at a time.

    Attributes:
        lends: large payloads go out of the memory itself, which stays as it is until their answer.
    """

    def __init__(
        self,
        wire: Wire,
        block_bytes: int,
        stall_timeout_s: float,
        threads: Executor,
        *,
        takes_fd: bool = False,
        poll_s: float = 0.0,
        senders: Executor | None = None,
    ) -> None:
        """Greets nobody yet.

        Args:
            threads: large payloads move in them.
            takes_fd: accept one descriptor from the peer.
            poll_s: the loop is blocked so long at most for a next frame before others work, while
                that pays (`Polling`).
            senders: large payloads leave in these instead: a peer that takes them slowly, or a
                budget, holds none up that arrive.
        """
        super().__init__(wire, stall_timeout_s)
        self.decoder = FrameDecoder(block_bytes)
        self.lends = False
        self._has_begun = False  # some of the frame that is being sent has left
        self._takes_fd = takes_fd
        self._poll_s = poll_s
        self._pollings: dict[type[Frame] | None, Polling] = {}  # by the frame before the look
        self._newest: type[Frame] | None = None
        self._alone_since = 0.0
        self._threads, self._senders = threads, senders or threads
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._events: deque[FrameEvent] = deque()
        # What was read last was all there was: look again only when the loop says so. TLS may have
        # bytes that the loop does not know of.
        self._is_dry = False
        self._may_be_dry = isinstance(wire, socket.socket)
        self._read_on: Callable[[], None] | None = None
        # Calls outside of the interpreter count here what they moved; TLS has none of them.
        self._native = load_native() if isinstance(wire, socket.socket) else None

    # --- sending -----------------------------------------------------------------------------

    async def send(self, head: bytes, fd: int | None = None) -> None:
        """Sends a frame without payload, with a descriptor if one is given.

        Cancelled, it cuts the socket, unless nothing of the frame has left.

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

        Cancelled, it cuts the socket, unless nothing of the frame has left: who waits for a budget
        takes nobody along. In any case `views` are not read after it ended, or with `lends` after
        the answer.

        Args:
            pacer: budget that the payload is sent within; None is no bound.
            share: of the budget.

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
        """Piece by piece, each in its turn; no thread is held meanwhile, others have to send."""
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
        """Bytes that went; 0 when there is no room."""
        try:
            count = self.wire.sendmsg(buffers, ancillary, _NOW)
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
        """Sends buffers; returns the sum with the batch, of the payload, that is in them."""
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
            except BlockingIOError:  # the socket's timeout: look whether it was cut, go on
                continue
            except OSError as error:
                raise self._lost(error) from error
            self.watch.progress()
            self._counted_bytes += count
            cursor.advance(count)
            batch = cursor.batch(PIECE_BYTES)

    # --- receiving ---------------------------------------------------------------------------

    async def receive(self, *, greedy: bool = False) -> Frame | PayloadStart | None:
        """The next frame; None when the peer closed between two frames.

        Args:
            greedy: read ahead; for a peer that sends no payloads.

        Raises:
            LostError: the socket failed, was cut, or ended within a frame.
            ProtocolError: the peer broke the frame format.
        """
        while not self._events:
            # Never more than wanted: the bytes of a payload stay in the socket.
            piece = self._scratch if greedy else self._scratch[: self.decoder.wanted]
            if self.decoder.at_boundary:
                if self._is_there_soon():
                    # A peer that never rests must not have it alone. The loop's own clock may
                    # stand still until its next turn.
                    if (now := monotonic()) - self._alone_since >= _ALONE_S:
                        self._alone_since = now
                        await asyncio.sleep(0)
                elif self._is_dry:
                    await self._readable()
                count = await self._receive_now([piece])
            else:
                with self.watch.under_way():
                    count = await self._receive_now([piece])
            if count == 0:
                if self.decoder.at_boundary and self._cause is None:
                    return None
                raise self._lost("closed by the peer")
            self._is_dry = greedy and self._may_be_dry and count < len(piece)
            self._events.extend(self.decoder.feed(piece[:count]))
        event = self._events.popleft()
        assert not isinstance(event, PayloadBytes | PayloadEnd), "read the payload first"
        self._newest = type(event.frame if isinstance(event, PayloadStart) else event)
        return event

    def read_on(self, take: Callable[[FrameEvent], None], ended: Callable[[str], None]) -> None:
        """From here on hands over every event from the loop's callback, until the socket ends.

        For a peer that sends no payloads, and instead of `receive`.

        Args:
            take: may raise ProtocolError, which ends the reading as well.
            ended: told once, why; nothing is read any more.
        """

        def on_readable() -> None:
            if not self._is_watched:
                return
            try:
                while (count := self._read_at_once()) is not None:
                    if count == 0:
                        raise self._lost("closed by the peer")
                    for event in self.decoder.feed(self._scratch[:count]):
                        take(event)
                    if self._may_be_dry and count < len(self._scratch):
                        return
            except (LostError, ProtocolError) as error:
                self._unwatch()
                ended(str(error))

        self._read_on = on_readable
        self._watch(on_readable)
        self._loop.call_soon(on_readable)  # for what TLS has decrypted already

    def read_soon(self) -> None:
        """Looks for bytes as `receive` does, and hands their events over; after `read_on`."""
        if self._is_watched and self._read_on is not None and self._is_there_soon():
            self._read_on()

    def _is_there_soon(self) -> bool:
        if self._poll_s == 0 or self._native is None:
            return False
        polling = self._pollings.get(self._newest)
        if polling is None:
            polling = self._pollings[self._newest] = Polling(self._poll_s)
        wait_s = polling.next_s()
        if wait_s == 0:
            return False
        came = self._native.poll(self.wire.fileno(), wait_s)
        polling.saw(came)
        return came

    def _read_at_once(self) -> int | None:
        """Bytes now in the scratch memory, 0 at the end; None when there is nothing yet."""
        try:
            count = self.wire.recvmsg_into([self._scratch], 0, _NOW)[0]
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._lost(error) from error
        self.watch.progress()
        return count

    async def receive_payload(self, views: Sequence[memoryview]) -> bool:
        """Reads the announced payload straight into `views`; returns whether it is intact.

        Cancelled, it cuts the socket; in any case `views` are not written after it ended.

        Raises:
            LostError: as `receive`.
        """
        num_bytes = num_bytes_of(views)
        with self.watch.under_way():
            if num_bytes > INLINE_BYTES:
                await self._in_thread(self._threads, partial(self._fill_in_thread, views))
            else:
                cursor = ViewCursor(views)
                while not cursor.at_end:
                    batch = cursor.batch(PIECE_BYTES)
                    count = self._counted(await self._receive_now(batch))
                    self._payload_came(batch, count)
                    cursor.advance(count)
            return await self._payload_end()

    async def drop_payload(self) -> bool:
        """Reads the announced payload away; returns whether it was intact."""
        with self.watch.under_way():
            while self.decoder.in_payload:
                batch = [self._scratch[: self.decoder.wanted]]
                self._payload_came(batch, self._counted(await self._receive_now(batch)))
                await asyncio.sleep(0)  # a refused flood must not take the loop's time
            return await self._payload_end()

    def _fill_in_thread(self, views: Sequence[memoryview]) -> None:
        has_sum = self.decoder.has_sum
        native = self._native_for(self.decoder.sum if has_sum else None)
        if native is not None:
            self._raise_if_cut()
            try:
                value = native.receive(
                    self.wire.fileno(), ranges_of(views), self._receiving, has_sum=has_sum
                )
            except OSError as error:
                raise self._lost(error) from error
            self._payload_ended(self.decoder.take_whole_payload(value))
            return
        cursor = ViewCursor(views)
        while not cursor.at_end:
            batch = cursor.batch(PIECE_BYTES)
            self._raise_if_cut()
            try:
                count = self.wire.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:  # the socket's timeout
                continue
            except OSError as error:
                raise self._lost(error) from error
            self.watch.progress()
            self._payload_came(batch, self._counted(count))
            cursor.advance(count)

    def _payload_came(self, batch: list[memoryview], count: int) -> None:
        self._payload_ended(self.decoder.take_payload(batch, count))

    def _payload_ended(self, end: PayloadEnd | None) -> None:
        if end is not None:
            self._events.append(end)

    async def _payload_end(self) -> bool:
        while not self._events:
            piece = self._scratch[: self.decoder.wanted]
            count = self._counted(await self._receive_now([piece]))
            self._events.extend(self.decoder.feed(piece[:count]))
        end = self._events.popleft()
        assert isinstance(end, PayloadEnd), "the reader asks for no more than the trailer"
        return end.intact

    async def _receive_now(self, buffers: list[memoryview]) -> int:
        while True:
            try:
                room = socket.CMSG_SPACE(DESCRIPTOR.size) if self._takes_fd else 0
                count, ancillary, *_ = self.wire.recvmsg_into(buffers, room, _NOW)
            except BlockingIOError:
                self._raise_if_cut()
                await self._readable()
                continue
            except OSError as error:
                raise self._lost(error) from error
            if ancillary:
                self._take_fd(ancillary)
            self.watch.progress()
            return count

    def _native_for(self, sum_: Sum | None) -> NativeIo | None:
        """The native calls if they are there and make this sum."""
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

    def _counted(self, count: int) -> int:
        if count == 0:
            raise self._lost("closed by the peer")
        return count
