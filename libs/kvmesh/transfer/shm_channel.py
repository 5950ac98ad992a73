"""Shared memory to one peer on this host: the receiver copies out of this side's mapped pool.

The pool's memfd goes over a Unix socket once; afterwards frames carry block numbers only. The
receiver decides which of its blocks are written and makes the only copy. For a device pool it maps
the staging memory instead.
Tests: tests/contract/test_channels.py, tests/integration/test_transfer_failures.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.core.types import HostRoute, Reservation
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.device import Moment
from kvmesh.transfer.frames import BlockPart, Checksum, LinkOffer
from kvmesh.transfer.greeting import LaneOptions, Link, sender_machine
from kvmesh.transfer.lane import Lane, claim_of
from kvmesh.transfer.lane_channel import LaneChannel
from kvmesh.transfer.memory import MappablePool
from kvmesh.transfer.sockets import connect_local
from kvmesh.transfer.staging import SendMemory, StagingRing
from kvmesh.transfer.wire import Wire

PIECE_BYTES = 32 << 20
"""Maximum bytes of one PULL: a cancelled transfer waits for at most one."""


class ShmChannel(LaneChannel):
    """One Unix socket to one incarnation of a peer."""

    def __init__(self, lane: Lane, block_bytes: int, staging: StagingRing | None) -> None:
        """Use `open`."""
        most = PIECE_BYTES if staging is None else min(PIECE_BYTES, staging.piece_bytes)
        super().__init__(lane, max(1, most // block_bytes))
        self._staging = staging

    @classmethod
    async def open(
        cls, link: Link, route: HostRoute, options: LaneOptions, memory: SendMemory
    ) -> ShmChannel:
        """Connects and passes this side's pool to the receiver.

        Raises:
            RefusedError, LostError: as `Lane.open`; lost also if the path is not visible here.
        """
        assert isinstance(memory, MappablePool), "chosen only for pools with a memfd"

        async def connected() -> Wire:
            return await connect_local(route.socket_path)

        offer = LinkOffer(link.link_id, 0, Checksum.NONE, memory.num_blocks)
        machine = sender_machine(link.identity, link.peer, offer)
        lane = await Lane.open(connected, machine, options, link.meter, link.threads, memory.fd)
        staging = memory if isinstance(memory, StagingRing) else None
        return cls(lane, link.identity.layout.block_bytes, staging)

    async def put(
        self,
        reservation: Reservation,
        runs: Sequence[Run],
        part: BlockPart | None = None,
        after: Moment = None,
    ) -> None:
        """See `SendChannel.put`."""
        staging = self._staging
        if staging is None:
            await super().put(reservation, runs, part, after)
            return
        claim = claim_of(reservation)
        after = staging.moment() if after is None else after

        async def carry(piece: Sequence[Run]) -> None:
            async with staging.copied(piece, part, after, self) as staged:
                await self._lane.pull(claim, staged, part)

        await self._carry_pieces(runs, carry)
