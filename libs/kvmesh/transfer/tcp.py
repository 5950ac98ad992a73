"""The TCP data plane of a worker: `DataServer` receives, `ChannelPool` sends.

Tests: tests/integration/test_transfer.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kvmesh.core.errors import LostError
from kvmesh.core.types import KvLayout, Reservation, WorkerId
from kvmesh.transfer.frames import BlockRun
from kvmesh.transfer.meters import PeerMeter, TransferStatistics
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.tcp_client import ChannelOptions, DataChannel, PeerKey
from kvmesh.transfer.tcp_server import DataServer

__all__ = ["ChannelPool", "DataServer"]


@dataclass(slots=True)
class _Slot:
    """Place of one peer's channel; the lock lets one caller open it while others wait."""

    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_callers: int = 0
    channel: DataChannel | None = None

    @property
    def is_open(self) -> bool:
        return self.channel is not None and self.channel.is_open


class ChannelPool:
    """Sends KV into reservations; opens one channel per life of a peer and keeps it."""

    def __init__(
        self,
        layout: KvLayout,
        worker_id: WorkerId,
        incarnation: int,
        *,
        connect_timeout_s: float = 2.0,
        stall_timeout_s: float = 10.0,
        checksum: bool = True,
    ) -> None:
        """Nothing is opened before the first call.

        Args:
            layout: KV memory of this worker.
            worker_id: this worker.
            incarnation: its life.
            connect_timeout_s: for a new channel, greeting included.
            stall_timeout_s: a transfer fails when its channel makes no progress for this long.
            checksum: send a crc32 with each payload; about a quarter second per GB on each side.
        """
        self._identity = ChannelIdentity(worker_id, incarnation, layout)
        self._options = ChannelOptions(connect_timeout_s, stall_timeout_s, checksum)
        self._slots: dict[PeerKey, _Slot] = {}
        self._meters: dict[WorkerId, PeerMeter] = {}
        self._closed = False

    async def put(
        self,
        reservation: Reservation,
        runs: Sequence[tuple[int, int]],
        views: Sequence[memoryview],
    ) -> None:
        """Writes KV into a reservation's blocks; returns when it is there.

        Any number of calls may run at once; they share the channel fairly. When this returns or
        raises, cancellation included, the memory of `views` is not read any more.

        Args:
            reservation: where to; its worker must be reached under `data_endpoint`.
            runs: (first index within the reservation, number of blocks), at least one block.
            views: contiguous memory whose bytes are the runs' blocks, in order; need not be cut
                like the runs.

        Raises:
            RefusedError: the receiver said no; the refusal is its own.
            LostError: the channel died or stalled; the blocks hold anything.
        """
        channel = await self._channel(reservation)
        await channel.put(reservation, [BlockRun(first, count) for first, count in runs], views)

    async def commit(self, reservation: Reservation, first_token_id: int, num_tokens: int) -> None:
        """Tells the receiver that a reservation's KV is complete; returns when it took it over.

        Args:
            reservation: after all its `put` calls returned.
            first_token_id: the token that prefill sampled.
            num_tokens: positions with KV, the receiver's own cached prefix included.

        Raises:
            RefusedError: the receiver said no.
            LostError: the channel died or stalled; the receiver may or may not have taken it, and
                asking again is safe.
        """
        channel = await self._channel(reservation)
        await channel.commit(reservation, first_token_id, num_tokens)

    async def close(self) -> None:
        """Ends all channels; what is under way gets LostError. May be called again."""
        self._closed = True
        slots = list(self._slots.values())
        self._slots.clear()
        for slot in slots:
            async with slot.opening:
                if slot.channel is not None:
                    await slot.channel.close()

    def statistics(self) -> TransferStatistics:
        """What was sent."""
        num_open = sum(slot.is_open for slot in self._slots.values())
        return TransferStatistics(num_open, MappingProxyType(self._meters))

    async def _channel(self, reservation: Reservation) -> DataChannel:
        peer = PeerKey(reservation.data_endpoint, reservation.worker_id, reservation.incarnation)
        slot = self._slots.get(peer)
        if slot is None:
            # Peers come back with new incarnations: forget the channels that ended.
            for key in [k for k, s in self._slots.items() if not s.is_open and not s.num_callers]:
                del self._slots[key]
            slot = self._slots[peer] = _Slot()
        slot.num_callers += 1
        try:
            async with slot.opening:
                return await self._opened(slot, peer)
        finally:
            slot.num_callers -= 1

    async def _opened(self, slot: _Slot, peer: PeerKey) -> DataChannel:
        if self._closed:
            raise LostError("data channels are closed")
        if slot.channel is None or not slot.channel.is_open:
            meter = self._meters.setdefault(peer.worker_id, PeerMeter())
            slot.channel = await DataChannel.open(self._identity, peer, self._options, meter)
        return slot.channel
