"""A connection for queries, used by one thread that may block.

The engine's thread asks between two layers. It can do nothing before the answer, so it waits in the
socket itself, without an event loop. Frames and states are those of all channels.
Tests: tests/contract/test_queries.py.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from time import monotonic

from kvmesh.core.errors import LostError, ProtocolError, RefusedError
from kvmesh.transfer.checksums import checksum_function, sum_of
from kvmesh.transfer.codec import TRAILER, encode_frame
from kvmesh.transfer.cursor import ViewCursor
from kvmesh.transfer.decoder import FrameDecoder, FrameEvent, PayloadBytes, PayloadEnd, PayloadStart
from kvmesh.transfer.frames import Checksum, QueryFrame
from kvmesh.transfer.native import num_bytes_of
from kvmesh.transfer.pacing import Pacer
from kvmesh.transfer.sender_protocol import Arriving, Ended, Late, Opened, Refused, SenderMachine
from kvmesh.transfer.wire import Wire

PIECE_BYTES = 1 << 20
"""Maximum bytes that one socket call moves."""
AHEAD_BYTES = 64 << 10
"""Maximum bytes of answers that may be outstanding while the next query is sent.

They fit into the sockets' buffers. A holder that cannot send its answer stops reading, and then
both sides would wait for each other.
"""
PATIENCE = 4
"""Number of stall times within which a query must be sent, and within which its answer must come.

A peer that sends a byte now and then never times out in the socket, and the engine waits for it.
"""
_SCRATCH_BYTES = 4096


class Question:
    """A query and the buffers for its answer.

    Attributes:
        error: the reason why there will be no answer.
        is_answered: whether `into` is filled.
    """

    __slots__ = ("arguments", "error", "into", "is_answered", "op", "operands", "transfer_id")

    def __init__(
        self, op: int, arguments: bytes, operands: memoryview, into: Sequence[memoryview]
    ) -> None:
        """Reads `operands` and writes `into` until the question is answered or failed."""
        self.op = op
        self.arguments = arguments
        self.operands = operands
        self.into = into
        self.transfer_id = 0
        self.is_answered = False
        self.error: LostError | RefusedError | None = None

    @property
    def is_open(self) -> bool:
        """Whether an answer may still come."""
        return not self.is_answered and self.error is None


class QueryLine:
    """A connected socket on which answers come in the order of the questions."""

    def __init__(
        self,
        wire: Wire,
        machine: SenderMachine,
        stall_timeout_s: float,
        pacer: Pacer | None = None,
    ) -> None:
        """Wraps a connected socket; the caller calls `greet` next.

        Args:
            stall_timeout_s: seconds after which a peer that sends or takes nothing is lost. One
                exchange may take at most `PATIENCE` times as long.
            pacer: budget of sent query bytes; None for no limit.
        """
        self._pacer = pacer
        self._is_cut = threading.Event()
        self._wire = wire
        self._machine = machine
        self._decoder = FrameDecoder(machine.block_bytes)
        self._events: deque[FrameEvent] = deque()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._asked: deque[Question] = deque()
        self._patience_s = PATIENCE * stall_timeout_s
        self._deadline = 0.0
        self.is_open = True
        self.has_stalled = False
        """Whether the line failed because the peer was silent or slow; a new line would be, too."""
        limit = struct.pack("ll", *divmod(max(1, int(stall_timeout_s * 1e6)), 1_000_000))
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        wire.setblocking(True)

    def greet(self) -> None:
        """Sends HELLO and checks the answer.

        Raises:
            RefusedError: the peer is another worker or incarnation, or has another layout.
            LostError: the peer does not answer.
        """
        try:
            self._send([memoryview(encode_frame(self._machine.hello()))])
            self._hurry()
            event = self._next()
            assert not isinstance(event, PayloadBytes | PayloadEnd), "no payload has begun"
            outcome = self._machine.receive(
                event.frame if isinstance(event, PayloadStart) else event
            )
        except ProtocolError as error:
            raise LostError(f"queries: {error}") from error
        if isinstance(outcome, Ended):
            raise RefusedError(outcome.refusal)
        self._decoder.sum = checksum_function(self._machine.terms.checksum)

    @property
    def num_asked(self) -> int:
        """Number of questions without an answer so far."""
        return len(self._asked)

    def ask(self, question: Question) -> None:
        """Sends a question, in turn; `hear` receives its answer.

        Raises:
            LostError: the connection is gone, and with it all questions on it.
        """
        room = num_bytes_of(question.into)
        try:
            while self._asked and self._ahead_bytes() + room > AHEAD_BYTES:
                self._hear_next()
            if self._pacer is not None and self._is_cut.wait(
                self._pacer.delay(question.operands.nbytes)
            ):
                raise LostError("queries: closed by this side")
            kind = self._machine.terms.checksum
            question.transfer_id = self._machine.open_get(room)
            size = question.operands.nbytes
            frame = QueryFrame(
                question.transfer_id,
                question.op,
                room,
                question.arguments,
                size,
                kind is not Checksum.NONE,
            )
            views = [memoryview(encode_frame(frame, size)), question.operands]
            if kind is not Checksum.NONE:
                value = sum_of([question.operands], checksum_function(kind), 0)
                views.append(memoryview(TRAILER.pack(value)))
            self._asked.append(question)
            self._send(views)
        except LostError as error:
            self._lose(error)
            raise

    def hear(self, question: Question) -> None:
        """Waits until a question, and all before it, are answered or refused.

        Raises:
            RefusedError: the holder refused.
            LostError: the connection is gone.
        """
        while question.is_open:
            try:
                self._hear_next()
            except LostError as error:
                self._lose(error)
        if question.error is not None:
            raise question.error

    def cut(self) -> None:
        """Wakes a thread that waits on the line; callable from any thread."""
        self.is_open = False
        self._is_cut.set()
        try:
            self._wire.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Frees the socket; no thread may wait on it. May be called again."""
        self._lose(LostError("queries: closed by this side"))
        self._wire.close()

    def _ahead_bytes(self) -> int:
        return sum(num_bytes_of(each.into) for each in self._asked)

    def _hear_next(self) -> None:
        """Receives the next answer.

        Raises:
            LostError: the connection is gone.
        """
        self._hurry()
        try:
            event = self._next()
            assert not isinstance(event, PayloadBytes | PayloadEnd), "nothing reads past a payload"
            outcome = self._machine.receive(
                event.frame if isinstance(event, PayloadStart) else event
            )
            question = self._asked[0]
            if isinstance(outcome, Arriving):
                if outcome.transfer_id != question.transfer_id:
                    raise ProtocolError("reordered_transfer", f"answer {outcome.transfer_id}")
                intact = self._fill(question.into)
                outcome = self._machine.data_received(outcome.transfer_id, intact=intact)
        except ProtocolError as error:
            raise LostError(f"queries: {error}") from error
        if isinstance(outcome, Ended):
            raise LostError(f"queries: ended by the peer: {outcome.refusal.message}")
        if isinstance(outcome, Late | Opened) or outcome.transfer_id != question.transfer_id:
            raise LostError("queries: an answer out of turn")
        self._asked.popleft()
        if isinstance(outcome, Refused):
            question.error = RefusedError(outcome.refusal)
        else:
            question.is_answered = True

    def _lose(self, error: LostError) -> None:
        self.is_open = False
        for question in self._asked:
            question.error = error
        self._asked.clear()

    def _send(self, views: list[memoryview]) -> None:
        self._hurry()
        cursor = ViewCursor(views)
        while batch := cursor.batch(PIECE_BYTES):
            self._check_time()
            try:
                cursor.advance(self._wire.sendmsg(batch, [], 0))
            except OSError as error:
                raise self._lost(error) from error

    def _hurry(self) -> None:
        """Restarts the time limit for the next exchange."""
        self._deadline = monotonic() + self._patience_s

    def _check_time(self) -> None:
        if monotonic() > self._deadline:
            self.has_stalled = True
            raise LostError(f"queries: the peer is too slow, not done in {self._patience_s:g} s")

    def _lost(self, error: OSError) -> LostError:
        if isinstance(error, BlockingIOError):  # SO_RCVTIMEO or SO_SNDTIMEO expired
            self.has_stalled = True
            return LostError("queries: the peer is silent")
        return LostError(f"queries: {error}")

    def _receive(self, buffers: list[memoryview], flags: int = 0) -> int:
        self._check_time()
        try:
            count = self._wire.recvmsg_into(buffers, 0, flags)[0]
        except OSError as error:
            raise self._lost(error) from error
        if count == 0:
            raise LostError("queries: closed by the peer")
        return count

    def _next(self) -> FrameEvent:
        while not self._events:
            piece = self._scratch[: self._decoder.wanted]
            self._events.extend(self._decoder.feed(piece[: self._receive([piece])]))
        return self._events.popleft()

    def _fill(self, into: Sequence[memoryview]) -> bool:
        """Receives the payload; returns whether it was intact."""
        cursor = ViewCursor(into)
        while not cursor.at_end:
            batch = cursor.batch(PIECE_BYTES)
            count = self._receive(batch, socket.MSG_WAITALL)
            cursor.advance(count)
            end = self._decoder.take_payload(batch, count)
        if end is None:
            event = self._next()
            assert isinstance(event, PayloadEnd), "the trailer follows"
            end = event
        return end.intact
