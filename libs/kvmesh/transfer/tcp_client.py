"""The sending end of a TCP data channel.

Tests: tests/integration/test_transfer.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass

from kvmesh.core.errors import LostError, ProtocolError, RefusedError
from kvmesh.core.types import Endpoint, Reservation, WorkerId
from kvmesh.transfer.codec import TRAILER, encode_frame
from kvmesh.transfer.decoder import PayloadStart
from kvmesh.transfer.frames import BlockRun, CancelFrame, CommitFrame, PutFrame, WriteClaim
from kvmesh.transfer.meters import PeerMeter
from kvmesh.transfer.payload import PutPart, split_put
from kvmesh.transfer.protocol import (
    ChannelIdentity,
    Ended,
    Late,
    Moved,
    Opened,
    Refused,
    SenderMachine,
)
from kvmesh.transfer.sockets import PIECE_BYTES, FrameSocket, connect


@dataclass(frozen=True, slots=True)
class PeerKey:
    """Who a channel leads to: one life of a worker at one address."""

    endpoint: Endpoint
    worker_id: WorkerId
    incarnation: int


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """How channels behave.

    Attributes:
        connect_timeout_s: from the first packet to HELLO_OK.
        stall_timeout_s: a channel that owes progress and makes none for this long is cut.
        checksum: send a crc32 with each payload.
    """

    connect_timeout_s: float
    stall_timeout_s: float
    checksum: bool


class DataChannel:
    """One open connection to a receiver. Transfers share it, frame by frame in turn."""

    def __init__(
        self, frames: FrameSocket, machine: SenderMachine, options: ChannelOptions, meter: PeerMeter
    ) -> None:
        """Use `open`."""
        self._frames = frames
        self._machine = machine
        self._options = options
        self._meter = meter
        self._turn = asyncio.Lock()
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._notices: deque[CancelFrame] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._cause: str | None = None
        self._reading = asyncio.create_task(self._read_answers())

    @classmethod
    async def open(
        cls, identity: ChannelIdentity, peer: PeerKey, options: ChannelOptions, meter: PeerMeter
    ) -> DataChannel:
        """Connects and greets.

        Raises:
            RefusedError: the receiver is another worker, another life of it, or has another layout.
            LostError: nobody answers, or not in time, or not in our protocol.
        """
        machine = SenderMachine(identity, peer.worker_id, peer.incarnation)
        try:
            async with asyncio.timeout(options.connect_timeout_s):
                sock = await connect(peer.endpoint)
                frames = FrameSocket(sock, identity.layout.block_bytes, options.stall_timeout_s)
                try:
                    await frames.send(encode_frame(machine.hello()))
                    await _greeted(frames, machine)
                except BaseException:
                    frames.close()
                    raise
        except TimeoutError as error:
            text = f"data channel to {peer.endpoint}: no HELLO in {options.connect_timeout_s:g} s"
            raise LostError(text) from error
        meter.channels += 1
        return cls(frames, machine, options, meter)

    @property
    def is_open(self) -> bool:
        """Whether new transfers can be given to it."""
        return self._cause is None

    async def put(
        self, reservation: Reservation, runs: Sequence[BlockRun], views: Sequence[memoryview]
    ) -> None:
        """As `ChannelPool.put`, on this connection."""
        parts = split_put(runs, views, self._machine.block_bytes)
        total = sum(part.num_bytes for part in parts)
        transfer_id = self._machine.open_put(total)
        claim = _claim(reservation)
        started = asyncio.get_running_loop().time()
        unfinished = False
        try:
            async with self._answer_to(transfer_id) as answer:
                for part in parts:
                    last = part is parts[-1]
                    put = PutFrame(transfer_id, claim, part.runs, last, self._options.checksum)
                    async with self._turn:
                        if answer.done():
                            break
                        unfinished = not last
                        await self._whole(self._send_part(put, part))
                await answer
        finally:
            if unfinished:
                self._notices.append(CancelFrame(transfer_id))
        self._meter.bytes += total
        self._meter.calls += len(parts)
        self._meter.seconds += asyncio.get_running_loop().time() - started

    async def commit(self, reservation: Reservation, first_token_id: int, num_tokens: int) -> None:
        """As `ChannelPool.commit`, on this connection."""
        transfer_id = self._machine.open_commit()
        frame = CommitFrame(
            transfer_id, _claim(reservation), first_token_id, num_tokens, reservation.num_blocks
        )
        async with self._answer_to(transfer_id) as answer:
            async with self._turn:
                await self._whole(self._send_head(encode_frame(frame)))
            await answer
        self._meter.commits += 1

    async def close(self) -> None:
        """Ends the connection; what is under way gets LostError. May be called again."""
        self._fail("closed by this side")
        await asyncio.wait({self._reading})

    @contextlib.asynccontextmanager
    async def _answer_to(self, transfer_id: int) -> AsyncIterator[asyncio.Future[None]]:
        """Registers a transfer; inside, progress is owed. Counts how it ended."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers[transfer_id] = answer
        try:
            if self._cause is not None:
                raise LostError(self._cause)
            with self._frames.watch.under_way():
                yield answer
        except RefusedError:
            self._meter.refused += 1
            raise
        except LostError:
            self._meter.lost += 1
            raise
        finally:
            del self._answers[transfer_id]
            self._machine.give_up(transfer_id)
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # it may have failed while a send failed; that one was raised

    async def _whole(self, sending: Coroutine[None, None, None]) -> None:
        """Lets a frame that has begun reach its end even if the caller is cancelled.

        A cut frame would cost all transfers of the channel. A second cancellation cuts it; after
        that the caller's memory is not read again.
        """
        task = self._sending = asyncio.create_task(sending)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            try:
                await asyncio.wait({task})
            finally:
                if not task.done():
                    self._fail("a frame was cut by its sender")
                elif not task.cancelled():
                    task.exception()
            raise

    async def _send_part(self, put: PutFrame, part: PutPart) -> None:
        await self._send_head(encode_frame(put, part.num_bytes))
        crc = 0
        for view in part.views:
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                if put.checksum:
                    crc = zlib.crc32(piece, crc)
                await self._send(piece)
        if put.checksum:
            await self._send(TRAILER.pack(crc))

    async def _send_head(self, head: bytes) -> None:
        while self._notices:
            head = encode_frame(self._notices.popleft()) + head
        await self._send(head)

    async def _send(self, data: bytes | memoryview) -> None:
        try:
            await self._frames.send(data)
        except LostError as error:
            self._fail(str(error))
            raise

    async def _read_answers(self) -> None:
        cause = "data channel: closed by the peer"
        try:
            while (event := await self._frames.receive()) is not None:
                frame = event.put if isinstance(event, PayloadStart) else event
                self._take(self._machine.receive(frame))
        except (LostError, ProtocolError) as error:
            cause = str(error)
        self._fail(cause)
        # A sender that the cut woke up must be out of the socket before it is closed.
        async with self._turn:
            if self._sending is not None:
                await asyncio.wait({self._sending})
            self._frames.close()

    def _take(self, outcome: Opened | Moved | Refused | Ended | Late) -> None:
        match outcome:
            case Moved(transfer_id, complete):
                answer = self._answers.get(transfer_id)
                if complete and answer is not None and not answer.done():
                    answer.set_result(None)
            case Refused(transfer_id, refusal):
                answer = self._answers.get(transfer_id)
                if answer is not None and not answer.done():
                    answer.set_exception(RefusedError(refusal))
            case Ended(refusal):
                self._fail(f"data channel ended by the peer: {refusal.message}")
            case Late():
                self._meter.late += 1
            case Opened():
                raise AssertionError("the channel is open before it is read from here")

    def _fail(self, cause: str) -> None:
        """Marks the channel lost (the first cause stays) and tells everyone who waits."""
        if self._cause is not None:
            return
        self._cause = cause
        self._frames.cut(cause)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(LostError(cause))


async def _greeted(frames: FrameSocket, machine: SenderMachine) -> None:
    try:
        event = await frames.receive()
        if event is None:
            raise LostError("data channel: closed before HELLO_OK")
        outcome = machine.receive(event.put if isinstance(event, PayloadStart) else event)
    except ProtocolError as error:
        raise LostError(f"data channel: {error}") from error
    if isinstance(outcome, Ended):
        raise RefusedError(outcome.refusal)


def _claim(reservation: Reservation) -> WriteClaim:
    return WriteClaim(
        reservation.reservation_id,
        reservation.incarnation,
        reservation.generation,
        reservation.capability,
    )
