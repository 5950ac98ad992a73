"""A connected socket for frames: receives them, and (`SendingSocket`) sends them.

Tests: tests/integration/test_transfer.py.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from time import monotonic

from kvmesh.core.errors import LostError, ProtocolError
from kvmesh.transfer.cursor import ViewCursor
from kvmesh.transfer.decoder import (
    FrameDecoder,
    FrameEvent,
    PayloadBytes,
    PayloadEnd,
    PayloadStart,
)
from kvmesh.transfer.frames import Frame
from kvmesh.transfer.native import num_bytes_of, ranges_of
from kvmesh.transfer.polling import Polling
from kvmesh.transfer.sending_socket import INLINE_BYTES, NOW, PIECE_BYTES, SendingSocket
from kvmesh.transfer.waiting_socket import DESCRIPTOR
from kvmesh.transfer.wire import Wire

_SCRATCH_BYTES = 256 << 10
_AHEAD_BYTES = 32 << 10
"""Maximum bytes read ahead: hundreds of small frames block the loop for milliseconds."""
_ALONE_S = 1e-3
"""Maximum seconds, plus one poll, that a steady stream of frames may block the loop."""


class _Scratch(threading.local):
    """Memory for received heads, which are decoded before other work of the thread's loop runs."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_SCRATCH_BYTES))


_SCRATCH = _Scratch()


class FrameSocket(SendingSocket):
    """A frame connection with one reader at a time and one writer at a time (`SendingSocket`)."""

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
        """Wraps a connected socket; sends nothing yet.

        Args:
            threads: threads that receive large payloads.
            takes_fd: accept one descriptor from the peer.
            poll_s: maximum seconds that the loop busy-polls for the next frame before other work
                runs, while that pays (`Polling`).
            senders: threads that send large payloads; None for `threads`. With threads of its own
                a slow peer, or a budget, does not delay arriving payloads.
        """
        super().__init__(wire, stall_timeout_s, senders or threads)
        self.decoder = FrameDecoder(block_bytes)
        self._takes_fd = takes_fd
        self._poll_s = poll_s
        self._pollings: dict[type[Frame] | None, Polling] = {}  # by type of the previous frame
        self._newest: type[Frame] | None = None
        self._alone_since = 0.0
        self._threads = threads
        # Shared by all connections of the loop: anyone may open many, so each must cost little.
        self._scratch = _SCRATCH.view
        self._events: deque[FrameEvent] = deque()
        # The last read emptied the socket, so wait for the loop's event before the next read. TLS
        # may hold bytes that the loop does not know of.
        self._is_dry = False
        self._may_be_dry = isinstance(wire, socket.socket)
        self._read_on: Callable[[], None] | None = None

    async def receive(self, *, greedy: bool = False) -> Frame | PayloadStart | None:
        """Returns the next frame; None if the peer closed between two frames.

        Args:
            greedy: read ahead; for a peer that sends no payloads.

        Raises:
            LostError: the socket failed, was cut, or ended within a frame.
            ProtocolError: the peer broke the frame format.
        """
        # A peer that sends without pause must not occupy the loop. The loop's clock may stand still
        # until its next iteration.
        if (now := monotonic()) - self._alone_since >= _ALONE_S:
            self._alone_since = now
            await asyncio.sleep(0)
        while not self._events:
            # Never more than wanted: the bytes of a payload stay in the socket.
            piece = self._scratch[: _AHEAD_BYTES if greedy else self.decoder.wanted]
            if self.decoder.at_boundary:
                if not self._is_there_soon() and self._is_dry:
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
        """From now on passes every event to `take` from the loop's callback, until the socket ends.

        For a peer that sends no payloads, and instead of `receive`.

        Args:
            take: may raise ProtocolError, which also ends the reading.
            ended: called once with the cause when reading ends.
        """
        is_going_on = False

        def go_on() -> None:
            nonlocal is_going_on
            is_going_on = False
            on_readable()

        def on_readable() -> None:
            nonlocal is_going_on
            if not self._is_watched:
                return
            try:
                count = self._read_at_once()
                if count is None:
                    return
                if count == 0:
                    raise self._lost("closed by the peer")
                for event in self.decoder.feed(self._scratch[:count]):
                    take(event)
                # In its own loop iteration: a peer that answers without pause must not occupy the
                # loop. For a plain socket the loop knows whether there is more.
                if not self._may_be_dry and not is_going_on:
                    is_going_on = True
                    self._loop.call_soon(go_on)
            except (LostError, ProtocolError) as error:
                self._unwatch()
                ended(str(error))

        self._read_on = on_readable
        self._watch(on_readable)
        self._loop.call_soon(on_readable)  # for bytes that TLS has decrypted already

    def read_soon(self) -> None:
        """Polls for bytes as `receive` does, and passes their events on; only after `read_on`."""
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
        """Returns the bytes read into the scratch memory, 0 at the end; None if there are none."""
        try:
            count = self.wire.recvmsg_into([self._scratch[:_AHEAD_BYTES]], 0, NOW)[0]
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._lost(error) from error
        self.watch.progress()
        return count

    async def receive_payload(self, views: Sequence[memoryview]) -> bool:
        """Reads the announced payload straight into `views`; returns whether it is intact.

        Cuts the socket if cancelled. In any case `views` are not written after it has ended.

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
        """Reads and drops the announced payload; returns whether it was intact."""
        with self.watch.under_way():
            while self.decoder.in_payload:
                batch = [self._scratch[: self.decoder.wanted]]
                self._payload_came(batch, self._counted(await self._receive_now(batch)))
                await asyncio.sleep(0)  # a flood of refused payload must not occupy the loop
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
        self._counted_bytes += count
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

    async def _readable(self) -> None:
        await super()._readable()
        self._alone_since = monotonic()

    async def _receive_now(self, buffers: list[memoryview]) -> int:
        while True:
            try:
                room = socket.CMSG_SPACE(DESCRIPTOR.size) if self._takes_fd else 0
                count, ancillary, *_ = self.wire.recvmsg_into(buffers, room, NOW)
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

    def _counted(self, count: int) -> int:
        if count == 0:
            raise self._lost("closed by the peer")
        return count
