"""GET: reads blocks of a peer's pool into memory of this worker.

A connection answers in order, so a large read is split into pieces over several connections.
Tests: tests/contract/test_reads.py.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from kvmesh.core.cores import usable_cores
from kvmesh.core.errors import LostError, ProtocolError, RefusedError
from kvmesh.core.types import Endpoint, HostRoute, Refusal, WorkerId
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.transfer.alignment import Run, split_runs
from kvmesh.transfer.channel import IPC, LOCAL, NIXL, SHM, TCP, carry_all, kinds_to_ask
from kvmesh.transfer.channel_pool import SendOptions
from kvmesh.transfer.checksums import checksum_function
from kvmesh.transfer.codec import encode_frame
from kvmesh.transfer.cursor import ViewCursor
from kvmesh.transfer.decoder import PayloadStart
from kvmesh.transfer.frame_socket import FrameSocket
from kvmesh.transfer.frames import MAX_RUNS, BlockRun, GetFrame
from kvmesh.transfer.greeting import LaneOptions, PeerKey, asker_machine, open_frames
from kvmesh.transfer.host import host_id
from kvmesh.transfer.lane_width import lanes_by_cores
from kvmesh.transfer.local_channel import PROCESS_HUB, LocalHub
from kvmesh.transfer.memory import COPY_INLINE_BYTES, copy_views
from kvmesh.transfer.native import load_native
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.sender_protocol import Arriving, Ended, Late, Moved, Refused, SenderMachine
from kvmesh.transfer.sockets import connect_local
from kvmesh.transfer.threads import run_to_end
from kvmesh.transfer.tls import connect_wire
from kvmesh.transfer.wire import Wire

PIECE_BYTES = 8 << 20
"""Maximum payload bytes of one answer, unless one block is larger."""
MAX_PLACES = 256
"""Maximum number of connections that are kept, unless more are in use."""
_READ_OVER = {IPC: SHM, NIXL: TCP}
"""Kinds to read over in place of kinds that only write."""
_MAX_THREADS = 16
_MAX_TRIES = 3


@dataclass(frozen=True, slots=True)
class ReadLease:
    """A holder's promise that some of its blocks stay and may be read.

    Attributes:
        lease_id, generation, capability: the lease's right to read, which the holder checks.
    """

    lease_id: int
    worker_id: WorkerId
    incarnation: int
    generation: int
    capability: bytes
    data_endpoint: Endpoint
    host_route: HostRoute | None = None

    @property
    def claim(self) -> WriteClaim:
        """The right to read under this lease."""
        return WriteClaim(self.lease_id, self.incarnation, self.generation, self.capability)


class _ReadLane:
    """One connection; its users take turns request by request."""

    def __init__(self, frames: FrameSocket, machine: SenderMachine) -> None:
        self._frames = frames
        self._machine = machine
        frames.decoder.sum = checksum_function(machine.terms.checksum)
        self.turn = asyncio.Lock()
        self.is_open = True

    async def get(
        self, claim: WriteClaim, runs: Sequence[BlockRun], into: list[memoryview]
    ) -> None:
        """Sends one request and receives its answer; a cancellation closes the connection."""
        transfer_id = self._machine.open_get(sum(view.nbytes for view in into))
        done = False
        try:
            with self._frames.watch.under_way():
                await self._frames.send(encode_frame(GetFrame(transfer_id, claim, tuple(runs))))
                refusal = await self._answer(into)
            done = True
        except ProtocolError as error:
            raise LostError(f"data channel: {error}") from error
        finally:
            self._machine.give_up(transfer_id)
            if not done:
                self.cut("a read was given up")
                self._frames.close()
        if refusal is not None:
            raise RefusedError(refusal)

    async def _answer(self, into: list[memoryview]) -> Refusal | None:
        event = await self._frames.receive()
        if event is None:
            raise LostError("data channel: closed by the peer")
        outcome = self._machine.receive(event.frame if isinstance(event, PayloadStart) else event)
        if isinstance(outcome, Arriving):
            intact = await self._frames.receive_payload(into)
            outcome = self._machine.data_received(outcome.transfer_id, intact=intact)
        match outcome:
            case Moved():
                return None
            case Refused(_, refusal):
                return refusal
            case Ended(refusal):
                raise LostError(f"data channel ended by the peer: {refusal.message}")
            case Late():
                raise LostError("data channel: an answer out of turn")
        raise AssertionError("one request is open, and the channel is")

    @property
    def has_stalled(self) -> bool:
        """Whether it was cut because the holder made no progress."""
        return self._frames.has_stalled

    def cut(self, cause: str) -> None:
        """Stops further reads; the read under way gets LostError and frees the socket."""
        self.is_open = False
        self._frames.cut(cause)

    def drop(self) -> None:
        """Frees the socket of an unused connection."""
        self.cut("not used any more")
        self._frames.close()

    async def close(self) -> None:
        """Ends the connection. May be called again."""
        self.cut("closed by this side")
        async with self.turn:
            self._frames.close()


_PlaceKey = tuple[PeerKey, Endpoint, int]


@dataclass(slots=True, eq=False)
class _Place:
    """Place of one connection to one incarnation of a peer; the lock lets one caller open it."""

    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_callers: int = 0
    lane: _ReadLane | None = None


class BlockReader:
    """Reads blocks from any peer; keeps its connections."""

    def __init__(
        self, identity: ChannelIdentity, options: SendOptions, *, hub: LocalHub = PROCESS_HUB
    ) -> None:
        """Opens nothing before the first read.

        Args:
            identity: this worker.
            options: kinds, lanes, checksum, timeouts and TLS of a sender.
            hub: holders in this process.
        """
        load_native()
        self._identity = identity
        self._options = options
        self._num_lanes = options.lanes or lanes_by_cores(usable_cores())
        self._hub = hub
        self._host_id = host_id()
        self._places: OrderedDict[_PlaceKey, _Place] = OrderedDict()
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "kv-read")
        self._closed = False

    async def get(
        self, lease: ReadLease, runs: Sequence[BlockRun], into: Sequence[memoryview]
    ) -> None:
        """Fills memory with blocks of a lease; returns when they are there.

        When this returns or raises, cancellation included, nothing writes `into` any more.

        Args:
            runs: runs of indexes of the lease.
            into: writable, contiguous; filled in order. Their sizes add up to the blocks.

        Raises:
            RefusedError: the holder refused, with its refusal.
            LostError: the holder does not answer, or the connection died or stalled; the content of
                `into` is undefined.
        """
        block_bytes = self._identity.layout.block_bytes
        total = sum(run.count for run in runs) * block_bytes
        assert total == sum(view.nbytes for view in into) > 0, f"memory for {total} bytes"
        if await self._copied(lease, runs, into):
            return
        # The runs of split_runs have two sides; the second one is the place in `into`.
        places = [0]
        for run in runs:
            places.append(places[-1] + run.count)
        pairs = [Run(run.first, place, run.count) for run, place in zip(runs, places, strict=False)]
        pieces = split_runs(pairs, max(1, PIECE_BYTES // block_bytes), MAX_RUNS)
        cursor = ViewCursor(into)
        work: list[tuple[int, list[BlockRun], list[memoryview]]] = []
        for number, piece in enumerate(pieces):
            num_bytes = sum(run.count for run in piece) * block_bytes
            views = cursor.take(num_bytes)
            work.append((number, [BlockRun(run.source_start, run.count) for run in piece], views))

        async def carry(item: tuple[int, list[BlockRun], list[memoryview]]) -> None:
            number, piece_runs, views = item
            await self._carry(lease, number % self._num_lanes, piece_runs, views)

        await carry_all(work, carry, self._num_lanes)

    async def close(self) -> None:
        """Ends all connections; reads under way get LostError. May be called again."""
        self._closed = True
        while self._places:
            _, place = self._places.popitem()
            async with place.opening:
                if place.lane is not None:
                    await place.lane.close()
        self._threads.shutdown(wait=False)

    async def _copied(
        self, lease: ReadLease, runs: Sequence[BlockRun], into: Sequence[memoryview]
    ) -> bool:
        """Copies the blocks if the holder is in this process; False if it is elsewhere."""
        end = self._hub.find(PeerKey(lease.worker_id, lease.incarnation))
        if end is None or LOCAL not in self._options.kinds:
            return False
        grant = end.source.begin_read(GetFrame(0, lease.claim, tuple(runs)))
        if isinstance(grant, Refusal):
            raise RefusedError(grant)
        try:
            if grant.pieces is None:
                await self._fill(into, grant.views)
                return True
            assert end.staging is not None, "a source with a device pool has staging"
            after = end.staging.moment()
            cursor, count = ViewCursor(into), max(1, end.staging.piece_bytes // grant.pieces.size)
            for first in range(0, len(grant.pieces.starts), count):
                pieces = grant.pieces.cut(first, count)
                async with end.staging.gathered(pieces, after, self) as views:
                    await self._fill(cursor.take(pieces.num_bytes), views)
        finally:
            end.source.end_read(grant)
        return True

    async def _fill(self, into: Sequence[memoryview], views: Sequence[memoryview]) -> None:
        if sum(view.nbytes for view in into) <= COPY_INLINE_BYTES:
            copy_views(into, views)
        else:
            await run_to_end(self._threads, partial(copy_views, into, views))

    async def _carry(
        self, lease: ReadLease, index: int, runs: list[BlockRun], into: list[memoryview]
    ) -> None:
        """Reads one piece; retries on a new connection after a cut, unless the holder is silent."""
        peer = PeerKey(lease.worker_id, lease.incarnation)
        place = self._place((peer, lease.data_endpoint, index))
        place.num_callers += 1
        try:
            for tries in range(1, _MAX_TRIES + 1):
                lane = await self._lane(place, lease, index)
                async with lane.turn:
                    try:
                        await lane.get(lease.claim, runs, into)
                        return
                    except LostError:
                        if self._closed or lane.has_stalled or tries == _MAX_TRIES:
                            raise
        finally:
            place.num_callers -= 1

    async def _lane(self, place: _Place, lease: ReadLease, index: int) -> _ReadLane:
        async with place.opening:
            if self._closed:
                raise LostError("data channels are closed")
            if place.lane is None or not place.lane.is_open:
                place.lane = await self._open(lease, index)
            return place.lane

    def _place(self, key: _PlaceKey) -> _Place:
        place = self._places.get(key)
        if place is None:
            self._forget_unused(key[0])
            place = self._places[key] = _Place()
        self._places.move_to_end(key)
        return place

    def _forget_unused(self, peer: PeerKey) -> None:
        """Frees connections to earlier incarnations of a peer, and the least recently used ones.

        Nothing reads on an unused connection, so this side does not notice that a holder has gone.
        """
        unused = [key for key, place in self._places.items() if not place.num_callers]
        surplus = len(self._places) + 1 - MAX_PLACES
        for number, key in enumerate(unused):
            is_earlier = key[0].worker_id == peer.worker_id and key[0] != peer
            if is_earlier or number < surplus:
                lane = self._places.pop(key).lane
                if lane is not None:
                    lane.drop()

    async def _open(self, lease: ReadLease, index: int) -> _ReadLane:
        options = self._options
        peer = PeerKey(lease.worker_id, lease.incarnation)
        # A GET needs a KVMesh connection in any case.
        kinds = kinds_to_ask(options.kinds, _READ_OVER, self._host_id, lease.host_route)
        failure = LostError(f"no channel of {', '.join(options.kinds)} leads to the peer")
        for kind in kinds:
            machine = asker_machine(self._identity, peer, kind, index, options.checksum)
            lane = LaneOptions(options.connect_timeout_s, options.stall_timeout_s)
            to = partial(self._connect, lease, kind)
            try:
                frames = await open_frames(to, machine, lane, self._threads)
            except LostError as error:
                failure = error
                continue
            return _ReadLane(frames, machine)
        raise failure

    async def _connect(self, lease: ReadLease, kind: str) -> Wire:
        if kind == SHM:
            assert lease.host_route is not None, "usable on the same host only"
            return await connect_local(lease.host_route.socket_path)
        return await connect_wire(lease.data_endpoint, self._options.tls)
