"""One accepted connection of a `DataServer`. Tests: tests/integration/test_transfer_senders.py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np

from kvmesh.core.errors import LostError, ProtocolError
from kvmesh.core.types import Refusal, RefusalReason, WorkerId
from kvmesh.transfer.checksums import checksum_function
from kvmesh.transfer.codec import encode_frame
from kvmesh.transfer.decoder import PayloadStart
from kvmesh.transfer.frame_socket import FrameSocket
from kvmesh.transfer.frames import Checksum, GetFrame, PullFrame, PutFrame, QueryFrame
from kvmesh.transfer.memory import MappingError
from kvmesh.transfer.meters import LinkKey, LinkMeter, TransferObserver, TransferSample
from kvmesh.transfer.native import num_bytes_of
from kvmesh.transfer.nixl_process import EngineError
from kvmesh.transfer.pacing import Pacer, Share
from kvmesh.transfer.peer_pools import PeerPool, open_peer_pool
from kvmesh.transfer.protocol import (
    Ask,
    Commit,
    Copy,
    Drain,
    Forget,
    Read,
    ReceiverMachine,
    Reply,
    Write,
    last_word,
)
from kvmesh.transfer.query_ops import QueryGrant, QueryOps
from kvmesh.transfer.server_state import ServerState
from kvmesh.transfer.staging import Within
from kvmesh.transfer.stall import PaceWatch, Rest
from kvmesh.transfer.target import AlreadyThere, ReadSource, WriteGrant, WriteTarget
from kvmesh.transfer.threads import run_to_end

_READERS = "readers"
"""Group of the peers that read. It may hold half of the staging memory, one reader half of that;
the other half stays with arriving KV."""

PATIENCE_S = 60.0
"""Seconds that the rest of a payload may take at its measured speed before it is cut, in or out.

A payload under way holds blocks, staging memory or a query's place. This limit also ends it for a
peer that is never silent long enough to count as lost.
"""

Metering = Callable[[ReceiverMachine], tuple[LinkKey, LinkMeter, TransferObserver]]


def owner_of(reader: WorkerId | None, share: Share) -> Within:
    """Returns the owner of the staging memory that a read takes.

    Planned copies wait longest for a budget and hold their memory meanwhile. They all count as one
    reader, so they leave room to reads that a prompt waits for.
    """
    return Within(_READERS, share if share is Share.COPY else reader)


class ServerChannel:
    """Serves one connection until it ends.

    Attributes:
        is_metered: whether `serve` has asked for the peer's meter.
        pacer: egress budget of the peer's reads.
    """

    def __init__(
        self,
        frames: FrameSocket,
        machine: ReceiverMachine,
        target: WriteTarget,
        state: ServerState,
        threads: Executor,
        source: ReadSource,
        stall_timeout_s: float,
        queries: QueryOps | None = None,
    ) -> None:
        """Serves nothing yet.

        Args:
            stall_timeout_s: seconds within which HELLO must come, and over which the speed of a
                payload is measured.
        """
        self._source, self._queries = source, queries
        self._frames = frames
        self._machine = machine
        self._target = target
        self._state = state
        self._threads = threads
        self._peer_pool: PeerPool | None = None
        self._lane: tuple[WorkerId, int, int] | None = None
        self._hello_timeout_s = stall_timeout_s
        self._pace = PaceWatch(
            stall_timeout_s,
            PATIENCE_S,
            lambda: frames.moved_bytes,
            lambda measured, _: frames.cut(f"the peer is too slow: {measured}"),
            lambda: frames.held_back_s,
        )
        self.is_metered = False
        self.pacer: Pacer | None = None

    async def serve(self, metering: Metering) -> str:
        """Greets, then answers frames until the connection ends; returns the cause.

        Args:
            metering: called once, when the peer is known.
        """
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                greeted = await self._greet()
            if greeted:
                self._key, self._meter, self._observe = metering(self._machine)
                self.is_metered = True
                self._meter.channels += 1
                while await self._step():
                    pass
        except TimeoutError:
            return f"no HELLO in {self._hello_timeout_s:g} s"
        except ProtocolError as error:
            with contextlib.suppress(LostError):
                await self._frames.send(encode_frame(last_word(error)))
            return str(error)
        except LostError as error:
            return str(error)
        return "closed"

    def close(self) -> None:
        """Frees all resources; nothing may be under way."""
        self._pace.close()
        self._frames.close()
        if self._peer_pool is not None:
            self._peer_pool.close()
        if self._lane is not None and self._state.lanes.get(self._lane) is self._frames:
            del self._state.lanes[self._lane]

    async def _greet(self) -> bool:
        """Answers the peer's HELLO; False if that ended the connection."""
        event = await self._frames.receive()
        if event is None:
            return False
        frame = event.frame if isinstance(event, PayloadStart) else event
        action = self._machine.receive(frame)
        assert isinstance(action, Reply), "a HELLO has one answer"
        answer = action.frame
        if self._machine.peer is not None:
            try:
                await self._take_offer(self._machine.peer)
            except MappingError as error:
                answer = self._machine.turn_away("mapping", str(error))
            except EngineError as error:
                answer = self._machine.turn_away("engine", str(error))
        await self._frames.send(encode_frame(answer))
        return self._machine.peer is not None

    async def _take_offer(self, peer: WorkerId) -> None:
        offer = self._machine.offer
        self._frames.decoder.sum = checksum_function(self._machine.terms.checksum)
        if offer is None:
            return
        self._peer_pool = await open_peer_pool(
            peer, offer, self._frames, self._machine.block_bytes, self._state, self._threads
        )
        # The sender gave its old connection up, maybe before this side could notice.
        self._lane = (peer, offer.link_id, offer.lane)
        old = self._state.lanes.get(self._lane)
        if old is not None:
            old.cut("replaced by a new connection")
        self._state.lanes[self._lane] = self._frames

    async def _step(self) -> bool:
        event = await self._frames.receive(greedy=self._machine.has_pool)
        if event is None:
            return False
        frame = event.frame if isinstance(event, PayloadStart) else event
        match self._machine.receive(frame):
            case Reply(answer, close):
                await self._frames.send(encode_frame(answer))
                return not close
            case Write(put):
                await self._write(put)
            case Copy(pull):
                await self._copy(pull)
            case Read(get):
                await self._read(get)
            case Ask(query):
                await self._ask(query)
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
        grant = self._too_large(put) or self._target.begin_write(put)
        if isinstance(grant, Refusal):
            await self._drain(self._machine.write_refused(put, grant))
            return
        if isinstance(grant, AlreadyThere):
            intact = await self._frames.drop_payload()
            await self._answer(put, self._bytes_of(put), intact=intact)
            return
        started = asyncio.get_running_loop().time()
        intact = False
        try:
            intact = await self._fill(grant)
        finally:
            self._target.end_write(grant, intact)
        num_bytes = grant.num_bytes
        seconds = asyncio.get_running_loop().time() - started
        # The peer waits, so the answer goes before the statistics.
        await self._answer(put, num_bytes, intact=intact)
        if intact:
            self._moved(grant, num_bytes, len(put.runs), seconds)

    def _bytes_of(self, put: PutFrame) -> int:
        each = self._machine.block_bytes if put.part is None else put.part.size
        return put.num_blocks * each

    def _too_large(self, put: PutFrame) -> Refusal | None:
        staging = self._state.staging
        return None if staging is None else staging.refusal(self._bytes_of(put))

    async def _fill(self, grant: WriteGrant) -> bool:
        """Receives a payload into its blocks; returns whether it is intact and there."""
        if grant.pieces is None:
            return await self._receive(grant.views)
        assert self._state.staging is not None, "a target with a device pool has staging"
        async with self._state.staging.landing(grant.pieces, self._machine.peer) as landing:
            intact = await self._receive(landing.views)
            if intact:
                await landing.land()
            return intact

    async def _receive(self, views: Sequence[memoryview]) -> bool:
        with self._at_pace(num_bytes_of(views)):
            return await self._frames.receive_payload(views)

    @contextlib.contextmanager
    def _at_pace(self, num_bytes: int) -> Iterator[None]:
        """Watches the speed of `num_bytes` that come or go inside the context."""
        rest = Rest(num_bytes)
        self._pace.begin(rest)
        try:
            yield
        finally:
            self._pace.end(rest)

    async def _read(self, get: GetFrame) -> None:
        staging = self._state.staging
        num_bytes = get.num_blocks * self._machine.block_bytes
        too_large = None if staging is None else staging.refusal(num_bytes)
        grant = too_large or self._source.begin_read(get)
        if isinstance(grant, Refusal):
            self._meter.refused += 1
            await self._frames.send(encode_frame(self._machine.refused(get, grant)))
            return
        try:
            if grant.pieces is None:
                await self._give(get, num_bytes, grant.views, grant.share)
            else:
                assert staging is not None, "a source with a device pool has staging"
                owner = owner_of(self._machine.peer, grant.share)
                async with staging.gathered(grant.pieces, staging.moment(), owner) as views:
                    await self._give(get, num_bytes, views, grant.share)
        finally:
            self._source.end_read(grant)

    async def _give(
        self,
        frame: GetFrame | QueryFrame,
        num_bytes: int,
        views: Sequence[memoryview],
        share: Share,
    ) -> None:
        kind = self._machine.terms.checksum
        sum_ = None if kind is Checksum.NONE else checksum_function(kind)
        head = encode_frame(
            self._machine.answered(frame, num_bytes, checksum=sum_ is not None), num_bytes
        )
        with self._at_pace(num_bytes):
            await self._frames.send_payload(head, views, sum_, self.pacer, share)

    async def _ask(self, query: QueryFrame) -> None:
        ops = self._queries
        assert ops is not None, "the machine knows no ops then"
        grant = ops.begin(query)
        if isinstance(grant, Refusal):
            await self._drain(Drain(query, self._machine.refused(query, grant)))
            return
        try:
            answer = await self._computed(ops, grant)
        finally:
            ops.end(grant)
        if not isinstance(answer, Refusal):
            await self._give(query, grant.answer_bytes, answer, Share.HANDOFF)
            return
        refused = self._machine.refused(query, answer)
        if self._frames.decoder.in_payload:
            await self._drain(Drain(query, refused))
            return
        self._meter.refused += 1
        await self._frames.send(encode_frame(refused))

    async def _computed(self, ops: QueryOps, grant: QueryGrant) -> Sequence[memoryview] | Refusal:
        """Receives the operands and computes the answer, or returns a refusal."""
        query = grant.query
        if grant.answer_bytes > query.answer_bytes:
            text = f"room: the answer has {grant.answer_bytes} bytes, not {query.answer_bytes}"
            return Refusal(RefusalReason.INVALID, text)
        # Not zeroed: that would block the loop, and touch memory for bytes that may never come.
        operands = np.empty(query.operand_bytes, np.uint8).data
        if not await self._receive([operands]):
            return Refusal(RefusalReason.LOST, "checksum: the operands' sum is wrong")
        assert self._state.answering is not None, "a server with ops has a thread for them"
        return await run_to_end(self._state.answering, partial(ops.compute, grant, operands))

    async def _copy(self, pull: PullFrame) -> None:
        grant = self._target.begin_write(pull.as_put())
        if isinstance(grant, Refusal):
            self._meter.refused += 1
            await self._frames.send(encode_frame(self._machine.pull_answered(pull, grant)))
            return
        if isinstance(grant, AlreadyThere):
            await self._frames.send(encode_frame(self._machine.pull_answered(pull, None)))
            return
        started = asyncio.get_running_loop().time()
        num_bytes = grant.num_bytes
        done = False
        try:
            assert self._peer_pool is not None, "runs of a pool that is not mapped are refused"
            await self._peer_pool.read(pull, grant)
            done = True
        finally:
            self._target.end_write(grant, done)
        seconds = asyncio.get_running_loop().time() - started
        # The peer waits, so the answer goes before the statistics.
        await self._frames.send(encode_frame(self._machine.pull_answered(pull, None)))
        self._moved(grant, num_bytes, len(pull.runs), seconds)

    def _moved(self, grant: WriteGrant, num_bytes: int, num_runs: int, seconds: float) -> None:
        calls = max(num_runs, len(grant.views))
        self._meter.bytes += num_bytes
        self._meter.calls += calls
        self._meter.frames += 1
        self._meter.seconds += seconds
        self._meter.busy_s += seconds
        self._observe(TransferSample(self._key, num_bytes, calls, seconds))

    async def _drain(self, drain: Drain) -> None:
        if drain.reply is not None:
            self._meter.refused += 1
            await self._frames.send(encode_frame(drain.reply))
        intact = await self._frames.drop_payload()
        if isinstance(drain.frame, PutFrame):
            await self._answer(drain.frame, 0, intact=intact)

    async def _answer(self, put: PutFrame, num_bytes: int, *, intact: bool) -> None:
        answer = self._machine.payload_received(put, num_bytes, intact=intact)
        if answer is not None:
            await self._frames.send(encode_frame(answer))
