"""The sending end of one connection: sends frames in turn and receives answers.

A channel has one lane or several. Each piece of a transfer is a transfer of its own on its lane, so
it is acknowledged, refused or lost by itself. Tests: tests/integration/test_transfer.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import Reservation
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.checksums import checksum_function
from kvmesh.transfer.codec import encode_frame
from kvmesh.transfer.decoder import FrameEvent, PayloadBytes, PayloadEnd, PayloadStart, Sum
from kvmesh.transfer.frame_socket import FrameSocket
from kvmesh.transfer.frames import (
    BlockPart,
    BlockRun,
    Checksum,
    CommitFrame,
    PullFrame,
    PullRun,
    PutFrame,
)
from kvmesh.transfer.greeting import Connect, LaneOptions, open_frames
from kvmesh.transfer.meters import LinkMeter
from kvmesh.transfer.native import num_bytes_of
from kvmesh.transfer.pacing import CreditWindow
from kvmesh.transfer.run_table import RunTable, num_blocks_of
from kvmesh.transfer.sender_protocol import (
    Arriving,
    Ended,
    Late,
    Moved,
    Opened,
    Refused,
    SenderMachine,
    SenderOutcome,
)
from kvmesh.transfer.sending_socket import INLINE_BYTES
from kvmesh.transfer.stall import Rest
from kvmesh.transfer.wire import Wire


class _Answer:
    """The answer to a transfer. Unlike a future it survives a cancelled waiter."""

    __slots__ = ("_error", "_is_there", "_waiter")

    def __init__(self) -> None:
        self._is_there = False
        self._error: RefusedError | LostError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def give(self, error: RefusedError | LostError | None = None) -> None:
        """Sets the result; the first call counts."""
        if self._is_there:
            return
        self._is_there, self._error = True, error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def come(self) -> None:
        """Waits for the result; one waiter at a time."""
        while not self._is_there:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def check(self) -> None:
        """Raises the error that was given, if any."""
        if self._error is not None:
            raise self._error


class Lane:
    """One open connection to a receiver. Its users take turns frame by frame."""

    def __init__(
        self,
        frames: FrameSocket,
        machine: SenderMachine,
        options: LaneOptions,
        meter: LinkMeter,
    ) -> None:
        """Use `open`."""
        self._frames = frames
        self._machine = machine
        self._pacer = options.pacer
        self._meter = meter
        self._turn = asyncio.Lock()
        self._answers: dict[int, _Answer] = {}
        self._window = CreditWindow(machine.terms.window_bytes)
        self._room = asyncio.Event()
        self._cause: str | None = None
        kind = machine.terms.checksum
        self._sum: Sum | None = None if kind is Checksum.NONE else checksum_function(kind)
        self._closing: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        # A PUT's blocks stay unchanged until its answer. A PUT lost without an answer may still
        # arrive, with the same bytes if the transfer continues, else for a reservation that nobody
        # commits. Staging memory reused meanwhile would deliver other bytes, which only a checksum
        # detects.
        frames.lends = not options.is_staged or self._sum is not None
        frames.read_on(self._receive, self._ended)

    @classmethod
    async def open(
        cls,
        connect: Connect,
        machine: SenderMachine,
        options: LaneOptions,
        meter: LinkMeter,
        threads: Executor,
        pool_fd: int | None = None,
    ) -> Lane:
        """Connects and greets.

        Args:
            connect: opens the socket.
            pool_fd: memfd of this side's pool, to send with the greeting.

        Raises:
            RefusedError: the receiver is another worker or incarnation, or has another layout.
            LostError: the receiver does not answer, answers too late, or breaks the protocol.
        """
        frames = await open_frames(connect, machine, options, threads, pool_fd)
        meter.channels += 1
        return cls(frames, machine, options, meter)

    @property
    def is_open(self) -> bool:
        """Whether the lane accepts new frames."""
        return self._cause is None

    @property
    def unanswered_bytes(self) -> int:
        """Payload bytes in flight: a measure of how busy the lane is."""
        return self._window.unanswered_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that the socket took since it was opened."""
        return self._frames.moved_bytes

    @property
    def held_back_s(self) -> float:
        """Seconds since it was opened in which it waited for a budget, not for the peer."""
        return self._frames.held_back_s

    def cut(self, cause: str) -> None:
        """Ends the lane now; transfers under way get LostError with this cause."""
        self._fail(cause)

    @property
    def wire(self) -> Wire:
        """The socket, for questions to the kernel."""
        return self._frames.wire

    async def put(
        self,
        claim: WriteClaim,
        runs: Sequence[Run],
        views: Sequence[memoryview],
        part: BlockPart | None = None,
        rest: Rest | None = None,
    ) -> None:
        """Sends one PUT and waits for its answer; `views` are not read after that.

        Args:
            rest: rest of the transfer that this is a piece of. If it was given up by the time of
                the piece's turn, the piece is not sent.

        Raises:
            RefusedError: the receiver refused.
            LostError: the lane died or stalled, or was cut because a caller was cancelled, or
                `rest` was given up.
        """
        num_bytes = num_bytes_of(views)
        has_sum = self._sum is not None
        block_runs = block_runs_of(runs)

        async def send(transfer_id: int) -> None:
            if rest is not None:
                rest.check()
            frame = PutFrame(transfer_id, claim, block_runs, checksum=has_sum, part=part)
            head = encode_frame(frame, num_bytes)
            await self._sent(self._frames.send_payload(head, views, self._sum, self._pacer))

        await self._transact(num_bytes, partial(self._machine.open_put, num_bytes), send)
        self._meter.frames += 1

    async def pull(
        self, claim: WriteClaim, runs: Sequence[Run], part: BlockPart | None = None
    ) -> None:
        """Asks the receiver to copy runs of this side's pool and waits until it has.

        If cancelled it still waits, or cuts the lane: the blocks must stay until then.

        Raises:
            RefusedError, LostError: as `put`.
        """
        each = self._machine.block_bytes if part is None else part.size
        num_bytes = num_blocks_of(runs) * each
        pull_runs: Sequence[PullRun]
        if type(runs) is RunTable:
            pull_runs = runs.fields(PullRun._make, 0, 3)
        else:
            pull_runs = tuple(map(PullRun._make, runs))

        async def send(transfer_id: int) -> None:
            head = encode_frame(PullFrame(transfer_id, claim, pull_runs, part))
            await self._sent(self._frames.send(head))

        await self._transact(num_bytes, partial(self._machine.open_put, num_bytes), send)
        self._meter.frames += 1

    async def commit(
        self, claim: WriteClaim, first_token_id: int, num_tokens: int, num_blocks: int
    ) -> None:
        """Tells the receiver the first token; returns when it knows it.

        Raises:
            RefusedError, LostError: as `put`.
        """

        async def send(transfer_id: int) -> None:
            frame = CommitFrame(transfer_id, claim, first_token_id, num_tokens, num_blocks)
            await self._sent(self._frames.send(encode_frame(frame)))

        await self._transact(0, self._machine.open_commit, send)
        self._meter.commits += 1

    async def close(self) -> None:
        """Ends the connection; transfers under way get LostError. May be called again."""
        self._fail("closed by this side")
        await self._over.wait()

    async def _transact(
        self,
        num_bytes: int,
        open_transfer: Callable[[], int],
        send: Callable[[int], Awaitable[None]],
    ) -> None:
        """Sends one frame in its turn, within the window, and waits for its answer."""
        while not self._window.has_room(num_bytes) and self._cause is None:
            self._room.clear()
            await self._room.wait()
        self._window.spend(num_bytes)
        transfer_id, is_owed = None, False
        try:
            async with self._turn:
                if self._cause is not None:
                    raise LostError(self._cause)
                # Numbered here, since callers that wait for room may be overtaken and ids must
                # rise.
                transfer_id = open_transfer()
                answer = self._answers[transfer_id] = _Answer()
                await send(transfer_id)
            # Not before: waiting for a budget must not count as silence of the peer.
            self._frames.watch.begin()
            is_owed = True
            if num_bytes <= INLINE_BYTES and len(self._answers) == 1:
                self._frames.read_soon()
            await self._settled(answer)
        finally:
            if is_owed:
                self._frames.watch.end()
            self._window.give_back(num_bytes)
            self._room.set()
            if transfer_id is not None:
                del self._answers[transfer_id]
                self._machine.give_up(transfer_id)

    async def _settled(self, answer: _Answer) -> None:
        """Waits for an answer, even if cancelled, since the receiver may be using the memory.

        A second cancellation cuts the lane instead.
        """
        try:
            await answer.come()
        except asyncio.CancelledError:
            try:
                await answer.come()
            except asyncio.CancelledError:
                self._fail("given up by its sender")
            raise
        answer.check()

    async def _sent(self, sending: Awaitable[None]) -> None:
        """Waits until a frame has left; a cancellation in the middle of it cuts the lane."""
        try:
            await sending
        except LostError as error:
            self._fail(str(error))
            raise
        except asyncio.CancelledError:
            if self._frames.is_cut:
                self._fail("a frame was cut by its sender")
            raise

    def _receive(self, event: FrameEvent) -> None:
        """Handles an answer. Called from the socket's callback, without a task in between."""
        assert not isinstance(event, PayloadBytes | PayloadEnd), "nothing reads past a payload"
        self._take(self._machine.receive(event.frame if isinstance(event, PayloadStart) else event))

    def _ended(self, cause: str) -> None:
        self._fail(cause)
        self._closing = asyncio.create_task(self._close_frames())

    async def _close_frames(self) -> None:
        # A sender that the cut woke up must be out of the socket before it is closed.
        async with self._turn:
            self._frames.close()
        self._over.set()

    def _take(self, outcome: SenderOutcome) -> None:
        match outcome:
            case Moved(_, complete=False):
                # A transfer is one PUT here; a peer could answer parts of it without end.
                self._fail("data channel: an answer to a part of what was sent")
            case Moved(transfer_id):
                answer = self._answers.get(transfer_id)
                if answer is not None:
                    answer.give()
            case Refused(transfer_id, refusal):
                answer = self._answers.get(transfer_id)
                if answer is not None:
                    answer.give(RefusedError(refusal))
            case Ended(refusal):
                self._fail(f"data channel ended by the peer: {refusal.message}")
            case Late():
                self._meter.late += 1
            case Opened() | Arriving():
                raise AssertionError("a lane is open, and asks for nothing")

    def _fail(self, cause: str) -> None:
        """Marks the lane lost (the first cause stays) and fails all waiting transfers."""
        if self._cause is not None:
            return
        self._cause = cause
        self._frames.cut(cause)
        self._room.set()
        for answer in self._answers.values():
            answer.give(LostError(cause))


def block_runs_of(runs: Sequence[Run]) -> Sequence[BlockRun]:
    """Returns the target runs of a PUT."""
    if type(runs) is RunTable:
        return runs.fields(BlockRun._make, 1, 3)
    return tuple([BlockRun(first, count) for _, first, count in runs])


def claim_of(reservation: Reservation) -> WriteClaim:
    """Returns the right to write into a reservation."""
    return WriteClaim(
        reservation.reservation_id,
        reservation.incarnation,
        reservation.generation,
        reservation.capability,
    )
