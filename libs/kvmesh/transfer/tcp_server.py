"""The receiving end of TCP data channels: accepts, asks the target, fills its blocks.

Frames of a channel are handled one after the other. Decisions are `ReceiverMachine`'s and the
target's. Tests: tests/integration/test_transfer.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from types import MappingProxyType

from kvmesh.core.errors import LostError, ProtocolError
from kvmesh.core.types import Endpoint, KvLayout, Refusal, WorkerId
from kvmesh.transfer.codec import encode_frame
from kvmesh.transfer.decoder import PayloadStart
from kvmesh.transfer.frames import PutFrame
from kvmesh.transfer.meters import PeerMeter, TransferStatistics
from kvmesh.transfer.protocol import (
    ChannelIdentity,
    Commit,
    Drain,
    Forget,
    ReceiverMachine,
    Reply,
    Write,
    last_word,
)
from kvmesh.transfer.sockets import FrameSocket, listen, local_endpoint
from kvmesh.transfer.target import WriteGrant, WriteTarget

_log = logging.getLogger(__name__)


class DataServer:
    """Listens for workers that write KV into a target."""

    def __init__(
        self,
        layout: KvLayout,
        worker_id: WorkerId,
        incarnation: int,
        target: WriteTarget,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        stall_timeout_s: float = 10.0,
    ) -> None:
        """Nothing is opened before `start`.

        Args:
            layout: KV memory of the target; peers with another are refused.
            worker_id: this worker; peers that look for another are refused.
            incarnation: this worker's life; frames for another are refused.
            target: where KV goes.
            host: address to bind and to be reached under.
            port: 0 takes a free one.
            stall_timeout_s: a channel without a whole HELLO after this long, or without progress
                for this long within a frame, is cut.
        """
        self._identity = ChannelIdentity(worker_id, incarnation, layout)
        self._target = target
        self._host, self._port = host, port
        self._stall_timeout_s = stall_timeout_s
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._meters: dict[WorkerId, PeerMeter] = {}
        self._filling: dict[WriteGrant, FrameSocket] = {}

    async def start(self) -> Endpoint:
        """Listens; returns where.

        Raises:
            OSError: the address cannot be bound.
        """
        assert self._listener is None, "started once"
        self._listener = await listen(self._host, self._port)
        self._accepting = asyncio.create_task(self._accept(self._listener))
        return local_endpoint(self._listener, self._host)

    async def close(self) -> None:
        """Cuts all channels; open grants end with `ok=False`. May be called again."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
        if self._listener is not None:
            self._listener.close()
        serving = [*self._serving]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def cut(self, grant: WriteGrant) -> None:
        """Ends the channel that fills this grant, for a writer that nobody waits for any more.

        Its `end_write(ok=False)` follows in a later turn of the loop. Other transfers of the same
        peer are lost with the channel; a writer that makes progress ends soon by itself. A grant
        that has ended is left alone.
        """
        frames = self._filling.get(grant)
        if frames is not None:
            frames.cut("the write is stale")

    def statistics(self) -> TransferStatistics:
        """What was received."""
        return TransferStatistics(len(self._serving), MappingProxyType(self._meters))

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or reset before it was taken
                _log.warning("data_accept_failed", extra={"error": str(error)})
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            task = loop.create_task(self._serve(sock))
            self._serving.add(task)
            task.add_done_callback(functools.partial(self._served, sock))

    def _served(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        sock.close()  # a task that was cancelled before its first step has not done it
        self._serving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("data_channel_crashed", exc_info=error)

    async def _serve(self, sock: socket.socket) -> None:
        frames = FrameSocket(sock, self._identity.layout.block_bytes, self._stall_timeout_s)
        machine = ReceiverMachine(self._identity)
        channel = _ServerChannel(frames, machine, self._target, self._meters, self._filling)
        cause = "closed"
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                greeted = await channel.greet()
            if greeted:
                await channel.run()
        except TimeoutError:
            cause = f"no HELLO in {self._stall_timeout_s:g} s"
        except ProtocolError as error:
            cause = str(error)
            with contextlib.suppress(LostError):
                await frames.send(encode_frame(last_word(error)))
        except LostError as error:
            cause = str(error)
        finally:
            frames.close()
            _log.info("data_channel_ended", extra={"peer": machine.peer, "cause": cause})
            if machine.peer is not None:
                self._target.peer_lost(machine.peer)


class _ServerChannel:
    """One accepted connection."""

    def __init__(
        self,
        frames: FrameSocket,
        machine: ReceiverMachine,
        target: WriteTarget,
        meters: dict[WorkerId, PeerMeter],
        filling: dict[WriteGrant, FrameSocket],
    ) -> None:
        self._frames = frames
        self._machine = machine
        self._target = target
        self._meters = meters
        self._filling = filling
        self._meter = PeerMeter()

    async def greet(self) -> bool:
        """Answers the peer's HELLO; False when that was the last word. Raises as `run`."""
        if not await self._step() or self._machine.peer is None:
            return False
        self._meter = self._meters.setdefault(self._machine.peer, PeerMeter())
        self._meter.channels += 1
        return True

    async def run(self) -> None:
        """Serves frames until the peer closes.

        Raises:
            LostError: the connection died.
            ProtocolError: the peer broke the protocol.
        """
        while await self._step():
            pass

    async def _step(self) -> bool:
        event = await self._frames.receive()
        if event is None:
            return False
        frame = event.put if isinstance(event, PayloadStart) else event
        match self._machine.receive(frame):
            case Reply(answer, close):
                await self._frames.send(encode_frame(answer))
                return not close
            case Write(put):
                await self._write(put)
            case Drain() as drain:
                await self._drain(drain)
            case Commit(commit):
                refusal = self._target.commit(commit)
                self._meter.commits += refusal is None
                self._meter.refused += refusal is not None
                answer = self._machine.commit_answered(commit, refusal)
                await self._frames.send(encode_frame(answer))
            case Forget():
                pass
        return True

    async def _write(self, put: PutFrame) -> None:
        grant = self._target.begin_write(put)
        if isinstance(grant, Refusal):
            await self._drain(self._machine.write_refused(put, grant))
            return
        num_bytes = sum(view.nbytes for view in grant.views)
        intact = False
        self._filling[grant] = self._frames
        try:
            intact = await self._frames.receive_payload([view.cast("B") for view in grant.views])
        finally:
            del self._filling[grant]
            self._target.end_write(grant, intact)
        if intact:
            self._meter.bytes += num_bytes
            self._meter.calls += 1
        await self._answer(put, num_bytes, intact=intact)

    async def _drain(self, drain: Drain) -> None:
        if drain.reply is not None:
            self._meter.refused += 1
            await self._frames.send(encode_frame(drain.reply))
        await self._answer(drain.put, 0, intact=await self._frames.drop_payload())

    async def _answer(self, put: PutFrame, num_bytes: int, *, intact: bool) -> None:
        answer = self._machine.payload_received(put, num_bytes, intact=intact)
        if answer is not None:
            await self._frames.send(encode_frame(answer))
