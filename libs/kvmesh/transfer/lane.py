"""The sending end of one connection: frames out in turn, answers in.

A channel has one lane or several. Each piece of a transfer is a transfer of its own on its lane, so
that it is acknowledged, refused or lost by itself. Tests: tests/integration/test_transfer.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from kvmesh.core.errors import LostError, ProtocolError, RefusedError
from kvmesh.core.types import Reservation, WorkerId
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.checksums import checksum_function
from kvmesh.transfer.codec import encode_frame
from kvmesh.transfer.decoder import PayloadStart, Sum
from kvmesh.transfer.frame_socket import FrameSocket, Wire
from kvmesh.transfer.frames import (
    BlockRun,
    Checksum,
    CommitFrame,
    Frame,
    LinkOffer,
    PullFrame,
    PullRun,
    PutFrame,
    WriteClaim,
)
from kvmesh.transfer.meters import LinkMeter
from kvmesh.transfer.pacing import CreditWindow, Pacer
from kvmesh.transfer.protocol import (
    ChannelIdentity,
    Ended,
    Late,
    Moved,
    Opened,
    Refused,
    SenderMachine,
)


@dataclass(frozen=True, slots=True)
class PeerKey:
    """Who a channel leads to: one life of a worker."""

    worker_id: WorkerId
    incarnation: int


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """How lanes behave.

    Attributes:
        connect_timeout_s: from the first packet to HELLO_OK.
        stall_timeout_s: a lane that owes progress and makes none for this long is cut.
        pacer: budget of the link; None is no bound.
    """

    connect_timeout_s: float
    stall_timeout_s: float
    pacer: Pacer | None = None


Connect = Callable[[], Awaitable[Wire]]


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
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._window = CreditWindow(machine.terms.window_bytes)
        self._room = asyncio.Event()
        self._cause: str | None = None
        kind = machine.terms.checksum
        self._sum: Sum | None = None if kind is Checksum.NONE else checksum_function(kind)
        self._reading = asyncio.create_task(self._read_answers())

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
            connect: gives the socket.
            pool_fd: memfd of this side's pool, to go along with the greeting.

        Raises:
            RefusedError: the receiver is another worker, another life of it, or has another layout.
            LostError: nobody answers, or not in time, or not in our protocol.
        """
        try:
            async with asyncio.timeout(options.connect_timeout_s):
                wire = await connect()
                frames = FrameSocket(wire, machine.block_bytes, options.stall_timeout_s, threads)
                try:
                    await frames.send(encode_frame(machine.hello()), pool_fd)
                    await _greeted(frames, machine)
                except BaseException:
                    frames.close()
                    raise
        except TimeoutError as error:
            text = f"data channel: no HELLO in {options.connect_timeout_s:g} s"
            raise LostError(text) from error
        meter.channels += 1
        return cls(frames, machine, options, meter)

    @property
    def is_open(self) -> bool:
        """Whether new frames can be given to it."""
        return self._cause is None

    @property
    def unanswered_bytes(self) -> int:
        """Payload on its way: how busy the lane is."""
        return self._window.unanswered_bytes

    @property
    def wire(self) -> Wire:
        """The socket, to ask the kernel about."""
        return self._frames.wire

    async def put(
        self, claim: WriteClaim, runs: Sequence[Run], views: Sequence[memoryview]
    ) -> None:
        """Sends one PUT and waits for its answer; `views` are not read after that.

        Raises:
            RefusedError: the receiver said no.
            LostError: the lane died or stalled, or was cut because the caller was cancelled.
        """
        num_bytes = sum(view.nbytes for view in views)
        transfer_id = self._machine.open_put(num_bytes)
        has_sum = self._sum is not None
        block_runs = tuple([BlockRun(first, count) for _, first, count in runs])
        head = encode_frame(PutFrame(transfer_id, claim, block_runs, checksum=has_sum), num_bytes)
        await self._transact(transfer_id, num_bytes, lambda: self._send_payload(head, views))
        self._meter.frames += 1

    async def pull(self, claim: WriteClaim, runs: Sequence[Run]) -> None:
        """Asks the receiver to copy runs of this side's pool and waits until it has.

        Cancelled, it still waits, or cuts the lane: the blocks must stay until then.

        Raises:
            RefusedError, LostError: as `put`.
        """
        num_bytes = sum(run.count for run in runs) * self._machine.block_bytes
        transfer_id = self._machine.open_put(num_bytes)
        pull_runs = tuple(map(PullRun._make, runs))
        head = encode_frame(PullFrame(transfer_id, claim, pull_runs))
        await self._transact(transfer_id, num_bytes, lambda: self._send_head(head))
        self._meter.frames += 1

    async def commit(
        self, claim: WriteClaim, first_token_id: int, num_tokens: int, num_blocks: int
    ) -> None:
        """Tells the receiver that its KV is complete; returns when it took it over.

        Raises:
            RefusedError, LostError: as `put`.
        """
        transfer_id = self._machine.open_commit()
        frame = CommitFrame(transfer_id, claim, first_token_id, num_tokens, num_blocks)
        await self._transact(transfer_id, 0, lambda: self._send_head(encode_frame(frame)))
        self._meter.commits += 1

    async def close(self) -> None:
        """Ends the connection; what is under way gets LostError. May be called again."""
        self._fail("closed by this side")
        await asyncio.wait({self._reading})

    async def _transact(
        self, transfer_id: int, num_bytes: int, send: Callable[[], Awaitable[None]]
    ) -> None:
        """Sends one frame in its turn, within the window, and waits for its answer."""
        while not self._window.has_room(num_bytes) and self._cause is None:
            self._room.clear()
            await self._room.wait()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers[transfer_id] = answer
        self._window.spend(num_bytes)
        self._frames.watch.begin()
        try:
            if self._cause is not None:
                raise LostError(self._cause)
            async with self._turn:
                if not answer.done():
                    await send()
            await self._settled(answer)
        finally:
            self._frames.watch.end()
            self._window.give_back(num_bytes)
            self._room.set()
            del self._answers[transfer_id]
            self._machine.give_up(transfer_id)
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # it may have failed while a send failed; that one was raised

    async def _settled(self, answer: asyncio.Future[None]) -> None:
        """Waits for an answer; cancelled, still waits: the receiver may be in the memory.

        A second cancellation cuts the lane instead.
        """
        try:
            await asyncio.shield(answer)
        except asyncio.CancelledError:
            try:
                await asyncio.wait({answer})
            except asyncio.CancelledError:
                self._fail("given up by its sender")
            raise

    async def _send_head(self, head: bytes) -> None:
        try:
            await self._frames.send(head)
        except LostError as error:
            self._fail(str(error))
            raise
        except asyncio.CancelledError:
            self._fail("a frame was cut by its sender")
            raise

    async def _send_payload(self, head: bytes, views: Sequence[memoryview]) -> None:
        try:
            await self._frames.send_payload(head, views, self._sum, self._pacer)
        except LostError as error:
            self._fail(str(error))
            raise
        except asyncio.CancelledError:
            self._fail("a frame was cut by its sender")
            raise

    async def _read_answers(self) -> None:
        cause = "data channel: closed by the peer"
        try:
            while (event := await self._frames.receive(greedy=True)) is not None:
                frame: Frame = event.frame if isinstance(event, PayloadStart) else event
                self._take(self._machine.receive(frame))
        except (LostError, ProtocolError) as error:
            cause = str(error)
        self._fail(cause)
        # A sender that the cut woke up must be out of the socket before it is closed.
        async with self._turn:
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
        """Marks the lane lost (the first cause stays) and tells everyone who waits."""
        if self._cause is not None:
            return
        self._cause = cause
        self._frames.cut(cause)
        self._room.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(LostError(cause))


async def _greeted(frames: FrameSocket, machine: SenderMachine) -> None:
    try:
        event = await frames.receive()
        if event is None:
            raise LostError("data channel: closed before HELLO_OK")
        outcome = machine.receive(event.frame if isinstance(event, PayloadStart) else event)
    except ProtocolError as error:
        raise LostError(f"data channel: {error}") from error
    if isinstance(outcome, Ended):
        raise RefusedError(outcome.refusal)


def claim_of(reservation: Reservation) -> WriteClaim:
    """By what right a reservation's holder writes."""
    return WriteClaim(
        reservation.reservation_id,
        reservation.incarnation,
        reservation.generation,
        reservation.capability,
    )


def sender_machine(
    identity: ChannelIdentity, peer: PeerKey, offer: LinkOffer | None
) -> SenderMachine:
    """The state of a new connection."""
    return SenderMachine(identity, peer.worker_id, peer.incarnation, offer)
