"""CUDA IPC to one peer on this host: the peer's device copies from this side's pool into its own.

The handle of this side's memory goes over a Unix socket once; afterwards frames carry block numbers
only. As with shared memory the receiver checks each claim and makes the only copy, by one kernel,
so nobody writes another's pool. The blocks are not written while they are read: the sender waits
for its steps before it sends PULL, and leaves the blocks alone until the answer.
Tests: tests/contract/test_channels.py, tests/integration/test_device_ipc.py.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

from kvmesh.core.errors import LostError
from kvmesh.core.types import HostRoute, Reservation
from kvmesh.telemetry.logs import event_logger
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.device import (
    HANDLE_BYTES,
    Moment,
    PeerMemory,
    Pieces,
    SharedMemory,
    SharedPool,
    pieces_of,
)
from kvmesh.transfer.frames import BlockPart, Checksum, LinkOffer, PullFrame, SegmentOffer
from kvmesh.transfer.greeting import LaneOptions, Link, sender_machine
from kvmesh.transfer.lane import Lane
from kvmesh.transfer.lane_channel import EngineChannel, or_lost
from kvmesh.transfer.nixl_process import EngineError
from kvmesh.transfer.sockets import connect_local
from kvmesh.transfer.threads import run_to_end
from kvmesh.transfer.wire import Wire

ENGINE = "cuda-ipc"
PIECE_BYTES = 64 << 20
"""Maximum bytes of one PULL: a cancelled transfer waits for at most one."""
_VERSION = 1
_MAX_ADDRESS = 1 << 48
_METADATA = struct.Struct(f"<HQ{HANDLE_BYTES}s")

log = event_logger(__name__)


def segment_of(memory: SharedMemory) -> SegmentOffer:
    """Describes a pool's memory for a HELLO."""
    metadata = _METADATA.pack(_VERSION, memory.num_bytes, memory.handle)
    return SegmentOffer(ENGINE, memory.offset, metadata)


def memory_of(segment: SegmentOffer, num_bytes: int) -> SharedMemory:
    """Decodes the memory of a pool of `num_bytes` from a HELLO's offer.

    Raises:
        EngineError: another version, a cut text, another size, or an address out of range.
    """
    if len(segment.metadata) != _METADATA.size:
        raise EngineError(f"{len(segment.metadata)} bytes name no device memory")
    version, size, handle = _METADATA.unpack(segment.metadata)
    if version != _VERSION or size != num_bytes:
        raise EngineError(f"version {version} of {size} bytes for a pool of {num_bytes}")
    if segment.address + size > _MAX_ADDRESS:
        raise EngineError(f"no allocation reaches to {segment.address}")
    return SharedMemory(handle, segment.address, size)


class IpcChannel(EngineChannel):
    """One Unix socket to one incarnation of a peer whose device reads this side's pool."""

    def __init__(self, lane: Lane, pool: SharedPool, block_bytes: int, threads: Executor) -> None:
        """Use `open`."""
        super().__init__(lane, max(1, PIECE_BYTES // block_bytes))
        self._pool = pool
        self._threads = threads

    @classmethod
    async def open(
        cls, link: Link, route: HostRoute, options: LaneOptions, pool: SharedPool
    ) -> IpcChannel:
        """Connects and offers this side's memory.

        Raises:
            RefusedError, LostError: as `Lane.open`; lost also if either side has no such device, or
                the peer's device does not reach the memory.
        """
        memory = await run_to_end(link.threads, pool.share)

        async def connected() -> Wire:
            return await connect_local(route.socket_path)

        offer = LinkOffer(link.link_id, 0, Checksum.NONE, pool.num_blocks, segment_of(memory))
        machine = sender_machine(link.identity, link.peer, offer)
        lane = await or_lost(Lane.open(connected, machine, options, link.meter, link.threads))
        return cls(lane, pool, link.identity.layout.block_bytes, link.threads)

    @property
    def is_barren(self) -> bool:
        """Whether no KV ever moved over the channel."""
        return not self.has_moved

    async def put(
        self,
        reservation: Reservation,
        runs: Sequence[Run],
        part: BlockPart | None = None,
        after: Moment = None,
    ) -> None:
        """See `SendChannel.put`."""
        # The peer's device queue does not know this device's queue.
        after = self._pool.moment() if after is None else after
        await run_to_end(self._threads, partial(self._pool.settle, after))
        await super().put(reservation, runs, part, after)


class IpcReader:
    """The receiving side of one connection: a peer's pool, mapped while the connection lives."""

    def __init__(
        self, pool: SharedPool, peer: PeerMemory, block_bytes: int, threads: Executor
    ) -> None:
        """Use `open`."""
        self._pool = pool
        self._peer = peer
        self._block_bytes = block_bytes
        self._threads = threads

    @classmethod
    async def open(
        cls,
        pool: object,
        segment: SegmentOffer,
        num_blocks: int,
        block_bytes: int,
        threads: Executor,
    ) -> IpcReader:
        """Maps the memory of a HELLO's offer.

        Args:
            pool: this side's pool, of any type.
            num_blocks: number of blocks of the peer's pool; they have the size of this side's.

        Raises:
            EngineError: this side has no device, or it does not reach the memory.
        """
        if not isinstance(pool, SharedPool):
            raise EngineError("the blocks of this worker are not on a device")
        memory = memory_of(segment, num_blocks * block_bytes)
        mapped: list[IpcReader] = []

        def map_peer() -> None:
            mapped.append(cls(pool, pool.map_peer(memory), block_bytes, threads))

        try:
            await run_to_end(threads, map_peer)
        except LostError as error:
            raise EngineError(str(error)) from error
        except asyncio.CancelledError:
            for reader in mapped:
                reader.close()
            raise
        return mapped[0]

    async def read(self, pieces: Pieces, pull: PullFrame) -> None:
        """Copies the blocks that a PULL names into pieces of this pool.

        When it returns or raises, cancellation included, nothing writes them any more.

        Raises:
            LostError: the device failed.
        """
        sources = pieces_of(pull.runs, self._block_bytes, pull.part)
        copy = partial(self._peer.copy, pieces, sources, self._pool.moment())
        await run_to_end(self._threads, copy)

    def close(self) -> None:
        """Unmaps the peer's pool, in a thread; no read may be under way."""
        self._threads.submit(self._unmap)

    def _unmap(self) -> None:
        try:
            self._peer.close()
        except LostError as error:
            log.warning("device_unmap_failed", error=str(error))
