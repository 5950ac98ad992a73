"""A sender's pool as its receiver reads it: mapped on the same host, over CUDA IPC, or by an engine
over the network. A sender that offers its pool sends no payloads; it names blocks (PULL).

Tests: tests/contract/test_channels.py.
"""

from __future__ import annotations

from concurrent.futures import Executor
from functools import partial
from typing import Protocol

from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import WorkerId
from kvmesh.transfer.channel import carry_all
from kvmesh.transfer.device import Pieces
from kvmesh.transfer.frame_socket import FrameSocket
from kvmesh.transfer.frames import BlockPart, LinkOffer, PullFrame
from kvmesh.transfer.ipc_channel import ENGINE as IPC_ENGINE
from kvmesh.transfer.ipc_channel import IpcReader
from kvmesh.transfer.memory import (
    COPY_INLINE_BYTES,
    MappedPool,
    MappingError,
    copy_ranges,
    places_of,
)
from kvmesh.transfer.nixl_process import EngineError
from kvmesh.transfer.nixl_reader import NixlReader, is_hung_up
from kvmesh.transfer.run_table import numbers_of
from kvmesh.transfer.server_state import ServerState
from kvmesh.transfer.target import WriteGrant
from kvmesh.transfer.threads import run_to_end

_STAGED_DEPTH = 2
"""Number of parts of one copy into a device pool that are under way at once."""


class PeerPool(Protocol):
    """The pool offered over one connection."""

    async def read(self, pull: PullFrame, grant: WriteGrant) -> None:
        """Fills a grant with the blocks that a PULL names.

        When it returns or raises, cancellation included, nothing writes into the grant.

        Raises:
            LostError: the peer or a device failed.
            ProtocolError: the engine failed.
        """
        ...

    def close(self) -> None:
        """Frees the pool; no read may be under way."""
        ...


async def open_peer_pool(
    peer: WorkerId,
    offer: LinkOffer,
    frames: FrameSocket,
    block_bytes: int,
    state: ServerState,
    threads: Executor,
) -> PeerPool | None:
    """Opens the pool of a HELLO's offer; None if the peer sends payloads instead.

    Args:
        frames: the connection that the offer came over.
        block_bytes: bytes of one block, the same on both sides.
        threads: threads for large copies.

    Raises:
        MappingError: the pool cannot be mapped.
        EngineError: the engine is missing here, or does not reach the pool.
    """
    segment, num_blocks = offer.segment, offer.pool_blocks
    if segment is not None and segment.engine == IPC_ENGINE:
        return _DevicePool(
            await IpcReader.open(state.pool, segment, num_blocks, block_bytes, threads)
        )
    if segment is not None:
        if state.readers is None:
            raise EngineError(f"no {segment.engine} here")
        return _RemotePool(state.readers.open(segment), frames, block_bytes)
    if not num_blocks:
        return None
    if frames.received_fd is None:
        raise MappingError("no descriptor came with the greeting")
    mapped = MappedPool(frames.received_fd, num_blocks, block_bytes)
    return _HostPool(mapped, peer, block_bytes, state, threads)


class _DevicePool:
    """A pool in the memory of a device, read by a device of this worker."""

    def __init__(self, reader: IpcReader) -> None:
        self._reader = reader

    async def read(self, pull: PullFrame, grant: WriteGrant) -> None:
        assert grant.pieces is not None, "the pool is on a device, or was not mapped"
        await self._reader.read(grant.pieces, pull)

    def close(self) -> None:
        self._reader.close()


class _RemotePool:
    """A pool on another host, read by an engine."""

    def __init__(self, reader: NixlReader, frames: FrameSocket, block_bytes: int) -> None:
        self._reader = reader
        self._frames = frames
        self._block_bytes = block_bytes

    async def read(self, pull: PullFrame, grant: WriteGrant) -> None:
        sources = places_of(numbers_of(pull.runs), self._block_bytes, pull.part)
        fd = self._frames.wire.fileno()
        try:
            await self._reader.read(grant.views, sources, partial(is_hung_up, fd))
        except EngineError as error:
            raise ProtocolError("engine", str(error)) from error

    def close(self) -> None:
        self._reader.kill()


class _HostPool:
    """A pool in shared memory of this host."""

    def __init__(
        self,
        mapped: MappedPool,
        peer: WorkerId,
        block_bytes: int,
        state: ServerState,
        threads: Executor,
    ) -> None:
        self._mapped = mapped
        self._peer = peer
        self._block_bytes = block_bytes
        self._state = state
        self._threads = threads

    async def read(self, pull: PullFrame, grant: WriteGrant) -> None:
        if grant.pieces is not None:
            await self._read_staged(pull, grant.pieces)
        elif grant.num_bytes <= COPY_INLINE_BYTES:
            self._copy(pull, grant)
        else:
            await run_to_end(self._threads, partial(self._copy, pull, grant))

    def _copy(self, pull: PullFrame, grant: WriteGrant) -> None:
        sources = self._mapped.byte_ranges(pull.runs, pull.part)
        copy_ranges(grant.views, sources, num_threads=self._state.copy_threads)

    async def _read_staged(self, pull: PullFrame, pieces: Pieces) -> None:
        """Copies into a device pool: while one part is copied another one lands."""
        staging = self._state.staging
        assert staging is not None, "a target with a device pool has staging"
        each = BlockPart(0, self._block_bytes)
        sources = self._mapped.byte_ranges(pull.runs, pull.part or each)
        count = max(1, staging.piece_bytes // pieces.size)

        async def carry(first: int) -> None:
            arriving = pieces.cut(first, count)
            async with staging.landing(arriving, self._peer) as landing:
                copy = partial(copy_ranges, landing.views, sources[first : first + count])
                await run_to_end(self._threads, copy)
                await landing.land()

        await carry_all(range(0, len(pieces.starts), count), carry, _STAGED_DEPTH)

    def close(self) -> None:
        self._mapped.close()
