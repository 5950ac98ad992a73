"""Channel between two workers of one process: the sender copies into the granted blocks.

Tests: tests/contract/test_channels.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import Refusal, RefusalReason, Reservation, WorkerId
from kvmesh.transfer.alignment import Run, split_runs
from kvmesh.transfer.channel import carry_all
from kvmesh.transfer.device import Moment
from kvmesh.transfer.frames import BlockPart, CommitFrame, PutFrame
from kvmesh.transfer.greeting import Link, PeerKey
from kvmesh.transfer.lane import block_runs_of, claim_of
from kvmesh.transfer.layouts import layout_difference
from kvmesh.transfer.memory import COPY_INLINE_BYTES, copy_views, run_views
from kvmesh.transfer.native import num_bytes_of
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.staging import SendMemory, StagingRing
from kvmesh.transfer.target import AlreadyThere, ReadSource, WriteGrant, WriteTarget
from kvmesh.transfer.threads import run_to_end

PIECE_BYTES = 32 << 20
_MAX_RUNS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class LocalEnd:
    """A receiver in this process.

    Attributes:
        staging: memory in which pieces for its device pool land first; None without a device.
    """

    identity: ChannelIdentity
    target: WriteTarget
    source: ReadSource
    loop: asyncio.AbstractEventLoop
    staging: StagingRing | None = None


class LocalHub:
    """The receivers of this process, by worker."""

    def __init__(self) -> None:
        self._ends: dict[WorkerId, LocalEnd] = {}

    def join(self, end: LocalEnd) -> None:
        """Adds a receiver that listens."""
        self._ends[end.identity.worker_id] = end

    def leave(self, end: LocalEnd) -> None:
        """Removes a receiver that no longer listens."""
        if self._ends.get(end.identity.worker_id) is end:
            del self._ends[end.identity.worker_id]

    def find(self, peer: PeerKey) -> LocalEnd | None:
        """Returns the receiver if this incarnation of it runs on the caller's event loop."""
        end = self._ends.get(peer.worker_id)
        if end is None or end.identity.incarnation != peer.incarnation:
            return None
        return end if end.loop is asyncio.get_running_loop() else None


PROCESS_HUB = LocalHub()
"""The hub of this process."""


class LocalChannel:
    """A channel to one incarnation of a peer in this process."""

    def __init__(self, link: Link, end: LocalEnd, hub: LocalHub, memory: SendMemory) -> None:
        """Opens the channel.

        Raises:
            RefusedError: the layouts differ.
        """
        layout = link.identity.layout
        if layout != end.identity.layout:
            message = "layout: " + layout_difference(layout, end.identity.layout)
            raise RefusedError(Refusal(RefusalReason.INVALID, message))
        self._me = link.identity.worker_id
        self._peer = link.peer
        self._end = end
        self._hub = hub
        self._memory = memory
        self._meter = link.meter
        self._threads = link.threads
        rings = [each for each in (memory, end.staging) if isinstance(each, StagingRing)]
        self._piece_bytes = min([PIECE_BYTES, *(ring.piece_bytes for ring in rings)])
        self._block_bytes = layout.block_bytes
        self._next_transfer_id = 1
        self._closed = False
        self._meter.channels += 1

    @property
    def is_open(self) -> bool:
        """Whether both ends are open."""
        return not self._closed and self._hub.find(self._peer) is self._end

    @property
    def num_connections(self) -> int:
        """See `SendChannel.num_connections`."""
        return int(self.is_open)

    async def put(
        self,
        reservation: Reservation,
        runs: Sequence[Run],
        part: BlockPart | None = None,
        after: Moment = None,
    ) -> None:
        """See `SendChannel.put`."""
        pieces = split_runs(runs, max(1, self._piece_bytes // self._block_bytes), _MAX_RUNS)
        if after is None and isinstance(self._memory, StagingRing):
            after = self._memory.moment()

        async def carry(piece: Sequence[Run]) -> None:
            await self._copy(reservation, piece, part, after)

        await carry_all(pieces, carry, width=2)

    async def commit(self, reservation: Reservation, first_token_id: int, num_tokens: int) -> None:
        """See `SendChannel.commit`."""
        self._require_open()
        frame = CommitFrame(
            self._transfer_id(),
            claim_of(reservation),
            first_token_id,
            num_tokens,
            reservation.num_blocks,
        )
        refusal = self._end.target.commit(frame)
        if refusal is not None:
            raise RefusedError(refusal)
        self._meter.commits += 1

    async def close(self) -> None:
        """See `SendChannel.close`."""
        if not self._closed:
            self._closed = True
            self._end.target.peer_lost(self._me)

    async def _copy(
        self,
        reservation: Reservation,
        runs: Sequence[Run],
        part: BlockPart | None,
        after: Moment,
    ) -> None:
        self._require_open()
        claim, block_runs = claim_of(reservation), block_runs_of(runs)
        put = PutFrame(self._transfer_id(), claim, block_runs, checksum=False, part=part)
        grant = self._end.target.begin_write(put)
        if isinstance(grant, Refusal):
            raise RefusedError(grant)
        if isinstance(grant, AlreadyThere):
            return
        done = False
        try:
            await self._move(grant, runs, part, after)
            done = True
        finally:
            self._end.target.end_write(grant, done)
        self._meter.frames += 1
        if self._closed:
            raise LostError("data channels are closed")

    async def _move(
        self, grant: WriteGrant, runs: Sequence[Run], part: BlockPart | None, after: Moment
    ) -> None:
        async with contextlib.AsyncExitStack() as stack:
            if isinstance(self._memory, StagingRing):
                sources = await stack.enter_async_context(
                    self._memory.views(runs, part, after, self)
                )
            else:
                sources = run_views(self._memory, runs, self._block_bytes, part)
            if grant.pieces is None:
                await self._fill(grant.views, sources)
                return
            assert self._end.staging is not None, "a target with a device pool has staging"
            landing = await stack.enter_async_context(self._end.staging.landing(grant.pieces, self))
            await self._fill(landing.views, sources)
            await landing.land()

    async def _fill(self, targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
        if num_bytes_of(sources) <= COPY_INLINE_BYTES:
            copy_views(targets, sources)
        else:
            await run_to_end(self._threads, partial(copy_views, targets, sources))

    def _transfer_id(self) -> int:
        self._next_transfer_id += 1
        return self._next_transfer_id - 1

    def _require_open(self) -> None:
        if not self.is_open:
            raise LostError(f"{self._peer.worker_id} is not in this process any more")
