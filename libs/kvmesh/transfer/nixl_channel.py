"""NIXL to one peer: the receiver reads granted blocks out of this side's registered pool.

Greeting, PULL, COMMIT and their answers go over a KVMesh connection, so the receiver checks every
right before it reads, and gives nobody the keys of its own memory. This kind is for adapters that
read by themselves (RDMA, or another process of the host). Where UCX must emulate that over TCP, the
TCP channel is faster.
Tests: tests/contract/test_channels.py, tests/integration/test_nixl.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from kvmesh.core.errors import LostError
from kvmesh.core.types import Endpoint, Reservation
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.device import Moment
from kvmesh.transfer.frames import MAX_METADATA_BYTES, BlockPart, Checksum, LinkOffer, SegmentOffer
from kvmesh.transfer.greeting import Link, sender_machine
from kvmesh.transfer.lane import Lane
from kvmesh.transfer.lane_channel import EngineChannel, or_lost
from kvmesh.transfer.memory import MappablePool, PoolMemory
from kvmesh.transfer.nixl_child import ADDRESS, BUSY, IDLE
from kvmesh.transfer.nixl_process import EngineError, NixlProcess
from kvmesh.transfer.nixl_reader import ENGINE
from kvmesh.transfer.tcp_channel import TcpOptions
from kvmesh.transfer.tls import connect_wire
from kvmesh.transfer.wire import Wire

PIECE_BYTES = 16 << 20
"""Maximum bytes of one PULL, which must arrive within the stall time."""


class NixlOwner:
    """This worker's pool as memory that peers may read; all its NIXL channels share it.

    Attributes:
        num_blocks: number of blocks in the pool.
    """

    def __init__(self, memory: PoolMemory) -> None:
        """Starts nothing before the first channel."""
        assert isinstance(memory, MappablePool), "chosen only for pools with a memfd"
        self._fd = memory.fd
        self._num_bytes = memory.read_view(0, memory.num_blocks).nbytes
        self.num_blocks = memory.num_blocks
        self._opening = asyncio.Lock()
        self._process: NixlProcess | None = None
        self._segment: SegmentOffer | None = None
        self._num_busy = 0
        self._closed = False

    async def segment(self) -> SegmentOffer:
        """Returns the offer by which a receiver reads the pool; starts the engine if necessary.

        Raises:
            LostError: the engine does not start.
        """
        async with self._opening:
            if self._closed:
                raise LostError("data channels are closed")
            if self._segment is not None and self._is_alive:
                return self._segment
            await self._end()
            try:
                self._process = await NixlProcess.start("own", self._fd, self._num_bytes)
                said = await self._process.answer()
            except EngineError as error:
                raise LostError(str(error)) from error
            metadata = said[ADDRESS.size :]
            if len(metadata) > MAX_METADATA_BYTES:
                raise LostError(f"NIXL has {len(metadata)} bytes of metadata")
            self._segment = SegmentOffer(ENGINE, ADDRESS.unpack_from(said)[0], metadata)
            if self._num_busy:
                self._process.tell(BUSY)
            return self._segment

    def offers(self, segment: SegmentOffer) -> bool:
        """Returns whether a segment can still be read: its engine runs."""
        return self._segment is segment and self._is_alive

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Peers read inside the context: the engine drives transports that need this side's CPU."""
        self._num_busy += 1
        if self._num_busy == 1 and self._process is not None:
            self._process.tell(BUSY)
        try:
            yield
        finally:
            self._num_busy -= 1
            if self._num_busy == 0 and self._process is not None:
                self._process.tell(IDLE)

    async def close(self) -> None:
        """Ends the engine; nobody reads the pool afterwards. May be called again."""
        self._closed = True
        async with self._opening:
            await self._end()

    @property
    def _is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive

    async def _end(self) -> None:
        if self._process is not None:
            await self._process.killed()
            self._process = None


class NixlChannel(EngineChannel):
    """One connection to one incarnation of a peer, which reads through its own engine."""

    def __init__(
        self, lane: Lane, owner: NixlOwner, segment: SegmentOffer, block_bytes: int
    ) -> None:
        """Use `open`."""
        super().__init__(lane, max(1, PIECE_BYTES // block_bytes))
        self._owner = owner
        self._segment = segment

    @classmethod
    async def open(
        cls, link: Link, endpoint: Endpoint, options: TcpOptions, owner: NixlOwner
    ) -> NixlChannel:
        """Connects and offers this side's pool.

        Raises:
            RefusedError, LostError: as `Lane.open`; lost also if either side has no engine.
        """
        segment = await owner.segment()

        async def connected() -> Wire:
            return await connect_wire(endpoint, options.tls)

        offer = LinkOffer(link.link_id, 0, Checksum.NONE, owner.num_blocks, segment)
        machine = sender_machine(link.identity, link.peer, offer)
        lane = await or_lost(Lane.open(connected, machine, options.lane, link.meter, link.threads))
        return cls(lane, owner, segment, link.identity.layout.block_bytes)

    @property
    def is_open(self) -> bool:
        """See `SendChannel.is_open`."""
        return super().is_open and self._owner.offers(self._segment)

    @property
    def is_barren(self) -> bool:
        """Whether no KV ever moved over the channel, though the engine of this side runs."""
        return not self.has_moved and self._owner.offers(self._segment)

    async def put(
        self,
        reservation: Reservation,
        runs: Sequence[Run],
        part: BlockPart | None = None,
        after: Moment = None,
    ) -> None:
        """See `SendChannel.put`."""
        with self._owner.busy():
            await super().put(reservation, runs, part, after)
