"""Base of channels with one connection. Subclasses define how the bytes of a transfer move.

Tests: tests/contract/test_channels.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import RefusalReason, Reservation
from kvmesh.transfer.alignment import Run, split_runs
from kvmesh.transfer.channel import carry_all
from kvmesh.transfer.device import Moment
from kvmesh.transfer.frames import BlockPart
from kvmesh.transfer.lane import Lane, claim_of

_MAX_PULL_RUNS = 2048
_DEPTH = 2

Carry = Callable[[Sequence[Run]], Awaitable[None]]


class LaneChannel:
    """One connection to one incarnation of a peer, whose transfers are PULLs."""

    def __init__(self, lane: Lane, piece_blocks: int) -> None:
        """`piece_blocks` is the maximum number of blocks of one PULL; at least 1."""
        self._lane = lane
        self._piece_blocks = piece_blocks

    @property
    def is_open(self) -> bool:
        """See `SendChannel.is_open`."""
        return self._lane.is_open

    @property
    def num_connections(self) -> int:
        """See `SendChannel.num_connections`."""
        return int(self._lane.is_open)

    async def put(
        self,
        reservation: Reservation,
        runs: Sequence[Run],
        part: BlockPart | None = None,
        after: Moment = None,
    ) -> None:
        """See `SendChannel.put`."""
        claim = claim_of(reservation)

        async def carry(piece: Sequence[Run]) -> None:
            await self._lane.pull(claim, piece, part)

        await self._carry_pieces(runs, carry)

    async def commit(self, reservation: Reservation, first_token_id: int, num_tokens: int) -> None:
        """See `SendChannel.commit`."""
        claim = claim_of(reservation)
        await self._lane.commit(claim, first_token_id, num_tokens, reservation.num_blocks)

    async def close(self) -> None:
        """See `SendChannel.close`."""
        await self._lane.close()

    async def _carry_pieces(self, runs: Sequence[Run], carry: Carry) -> None:
        pieces = split_runs(runs, self._piece_blocks, _MAX_PULL_RUNS)
        if len(pieces) == 1:
            await carry(pieces[0])
        else:
            await carry_all(pieces, carry, _DEPTH)


class EngineChannel(LaneChannel):
    """A channel whose peer reads by an engine; only a transfer shows whether the engine reaches it.

    Attributes:
        has_moved: whether a transfer has succeeded.
    """

    def __init__(self, lane: Lane, piece_blocks: int) -> None:
        super().__init__(lane, piece_blocks)
        self.has_moved = False

    async def _carry_pieces(self, runs: Sequence[Run], carry: Carry) -> None:
        async def noted(piece: Sequence[Run]) -> None:
            await carry(piece)
            self.has_moved = True

        await super()._carry_pieces(runs, noted)


async def or_lost(opening: Awaitable[Lane]) -> Lane:
    """Opens a lane; turns a refusal for a missing engine into LostError, so another kind is tried.

    Raises:
        RefusedError, LostError: as `Lane.open`.
    """
    try:
        return await opening
    except RefusedError as error:
        if error.refusal.reason is RefusalReason.LOST:
            raise LostError(str(error)) from error
        raise
