"""Shared memory to one peer on this host: the receiver copies out of this side's mapped pool.

The pool's memfd goes over a Unix socket once; afterwards frames carry block numbers only. The
receiver decides which of its blocks are written and makes the only copy. Of a device pool it maps
the staging memory instead.
Tests: tests/contract/test_channels.py, tests/integration/test_transfer_failures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

from kvmesh.core.types import HostRoute, Reservation
from kvmesh.transfer.alignment import Run, split_runs
from kvmesh.transfer.channel import carry_all
from kvmesh.transfer.frames import BlockPart, Checksum, LinkOffer
from kvmesh.transfer.lane import Lane, LaneOptions, PeerKey, claim_of, sender_machine
from kvmesh.transfer.memory import MappablePool
from kvmesh.transfer.meters import LinkMeter
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.sockets import connect_local
from kvmesh.transfer.staging import SendMemory, StagingRing
from kvmesh.transfer.wire import Wire

PIECE_BYTES = 32 << 20
"""Most that one PULL moves: what a cancelled transfer waits for."""
_MAX_PULL_RUNS = 2048
_DEPTH = 2


class ShmChannel:
    """One Unix socket to one life of a peer."""

    def __init__(self, lane: Lane, block_bytes: int, staging: StagingRing | None) -> None:
        """Use `open`."""
        self._lane = lane
        self._staging = staging
        most = PIECE_BYTES if staging is None else min(PIECE_BYTES, staging.piece_bytes)
        self._piece_blocks = max(1, most // block_bytes)

    @classmethod
    async def open(
        cls,
        identity: ChannelIdentity,
        peer: PeerKey,
        route: HostRoute,
        link_id: int,
        options: LaneOptions,
        memory: SendMemory,
        meter: LinkMeter,
        threads: Executor,
    ) -> ShmChannel:
        """Connects and hands this side's pool over.

        Raises:
            RefusedError, LostError: as `Lane.open`; lost also when the path is not visible here.
        """
        assert isinstance(memory, MappablePool), "chosen only for pools with a memfd"

        async def connected() -> Wire:
            return await connect_local(route.socket_path)

        offer = LinkOffer(link_id, 0, Checksum.NONE, memory.num_blocks)
        machine = sender_machine(identity, peer, offer)
        lane = await Lane.open(connected, machine, options, meter, threads, memory.fd)
        staging = memory if isinstance(memory, StagingRing) else None
        return cls(lane, identity.layout.block_bytes, staging)

    @property
    def is_open(self) -> bool:
        """See `SendChannel.is_open`."""
        return self._lane.is_open

    @property
    def num_connections(self) -> int:
        """See `SendChannel.num_connections`."""
        return int(self._lane.is_open)

    async def put(
        self, reservation: Reservation, runs: Sequence[Run], part: BlockPart | None = None
    ) -> None:
        """See `SendChannel.put`."""
        claim = claim_of(reservation)
        pieces = split_runs(runs, self._piece_blocks, _MAX_PULL_RUNS)

        staging = self._staging
        after = None if staging is None else staging.moment()

        async def carry(piece: Sequence[Run]) -> None:
            if staging is None:
                await self._lane.pull(claim, piece, part)
                return
            async with staging.copied(piece, part, after, self) as staged:
                await self._lane.pull(claim, staged, part)

        if len(pieces) == 1:
            await carry(pieces[0])
        else:
            await carry_all(pieces, carry, _DEPTH)

    async def commit(self, reservation: Reservation, first_token_id: int, num_tokens: int) -> None:
        """See `SendChannel.commit`."""
        claim = claim_of(reservation)
        await self._lane.commit(claim, first_token_id, num_tokens, reservation.num_blocks)

    async def close(self) -> None:
        """See `SendChannel.close`."""
        await self._lane.close()
