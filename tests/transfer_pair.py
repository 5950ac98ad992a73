"""Both ends of the data plane in one process, with a target that records what happens."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

from kvmesh.core.types import (
    Endpoint,
    KvLayout,
    Refusal,
    RefusalReason,
    Reservation,
    WorkerId,
)
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.data_server import DataAddress, DataServer, ReceiveOptions
from kvmesh.transfer.device import pieces_of
from kvmesh.transfer.frames import CommitFrame, PutFrame
from kvmesh.transfer.local_channel import LocalHub
from kvmesh.transfer.memory import create_shared
from kvmesh.transfer.meters import LinkKey, LinkMeter, TransferSample
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.target import WriteGrant
from tests.device_twin import FilledPool, TwinPool

LAYOUT = KvLayout("model", "float32", 16, 4, 2, 64)
BLOCK = LAYOUT.block_bytes  # 64 KiB
NUM_BLOCKS = 320  # more than two full frames
PREFILL, DECODE = WorkerId("p0"), WorkerId("d0")
SENDER = ChannelIdentity(PREFILL, 3, LAYOUT)
RECEIVER = ChannelIdentity(DECODE, 7, LAYOUT)
STALL_S = 0.3


@functools.cache
def _content(num_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


class SourcePool:
    """A sender's blocks of random bytes, or without a seed a receiver's of zeros, in a memfd."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, seed: int | None = 0) -> None:
        self.num_blocks = num_blocks
        self.fd, self._map = create_shared("test-pool", num_blocks * BLOCK)
        if seed is not None:
            self._map[:] = _content(num_blocks * BLOCK, seed)

    def read_view(self, first_block: int, num_blocks: int) -> memoryview:
        return memoryview(self._map)[first_block * BLOCK : (first_block + num_blocks) * BLOCK]

    def fill(self, byte: int) -> None:
        self._map[:] = bytes([byte]) * len(self._map)

    def close(self) -> None:
        os.close(self.fd)


@dataclass
class RecordingTarget:
    """Blocks in reverse order, so that index and place differ; remembers all that happens."""

    pool: SourcePool | FilledPool = field(default_factory=lambda: SourcePool(seed=None))
    capability: bytes = b"secret"
    refuse: Refusal | None = None
    granted: list[WriteGrant] = field(default_factory=list)
    ended: list[tuple[WriteGrant, bool]] = field(default_factory=list)
    commits: list[CommitFrame] = field(default_factory=list)
    lost: list[WorkerId] = field(default_factory=list)
    on_grant: Callable[[], None] = lambda: None

    def block(self, index: int) -> memoryview:
        place = NUM_BLOCKS - 1 - index
        return self.pool.read_view(place, 1)

    def begin_write(self, put: PutFrame) -> WriteGrant | Refusal:
        if self.refuse is not None:
            return self.refuse
        if not hmac.compare_digest(put.claim.capability, self.capability):
            return Refusal(RefusalReason.STALE, "capability")
        if any(run.first + run.count > NUM_BLOCKS for run in put.runs):
            return Refusal(RefusalReason.INVALID, "outside of the reservation")
        indexes = [run.first + i for run in put.runs for i in range(run.count)]
        if any(set(indexes) & set(self._indexes(grant)) for grant in self.open_grants):
            return Refusal(RefusalReason.BUSY, "another writer is in these blocks")
        grant = self._grant(put, indexes)
        self.granted.append(grant)
        self.on_grant()
        return grant

    def _grant(self, put: PutFrame, indexes: list[int]) -> WriteGrant:
        if isinstance(self.pool, FilledPool):
            runs = [(NUM_BLOCKS - 1 - index, 1) for index in indexes]
            return WriteGrant(put, (), pieces_of(runs, BLOCK, put.part))
        blocks = [self.block(index) for index in indexes]
        if put.part is not None:
            start, size = put.part
            blocks = [block[start : start + size] for block in blocks]
        return WriteGrant(put, tuple(blocks))

    @property
    def is_untouched(self) -> bool:
        return bytes(self.pool.read_view(0, NUM_BLOCKS)).count(0) == NUM_BLOCKS * BLOCK

    @staticmethod
    def _indexes(grant: WriteGrant) -> list[int]:
        return [run.first + i for run in grant.put.runs for i in range(run.count)]

    @property
    def open_grants(self) -> list[WriteGrant]:
        ended = [grant for grant, _ in self.ended]
        return [grant for grant in self.granted if grant not in ended]

    def end_write(self, grant: WriteGrant, ok: bool) -> None:
        self.ended.append((grant, ok))

    def commit(self, frame: CommitFrame) -> Refusal | None:
        if self.refuse is not None:
            return self.refuse
        self.commits.append(frame)
        return None

    def peer_lost(self, worker_id: WorkerId) -> None:
        self.lost.append(worker_id)

    def content(self, first: int, count: int) -> bytes:
        return b"".join(self.block(index) for index in range(first, first + count))

    def check_grants_ended_once(self) -> None:
        ended = [grant for grant, _ in self.ended]
        assert len(set(ended)) == len(ended)
        assert set(ended) == set(self.granted)


@dataclass
class Pair:
    """A sender and a receiver that see each other."""

    source: SourcePool | FilledPool
    target: RecordingTarget
    server: DataServer
    pool: ChannelPool
    reservation: Reservation
    samples: list[TransferSample]
    kind: str

    @property
    def sent(self) -> LinkMeter:
        return self.pool.statistics().links[LinkKey(DECODE, self.kind, "sent")]

    @property
    def received(self) -> LinkMeter:
        return self.server.statistics().links[LinkKey(PREFILL, self.kind, "received")]


def reservation_at(address: DataAddress, incarnation: int = 7) -> Reservation:
    """All blocks of the target behind an address."""
    return Reservation(
        reservation_id=11,
        worker_id=DECODE,
        incarnation=incarnation,
        generation=1,
        capability=b"secret",
        data_endpoint=address.endpoint,
        num_cached_blocks=0,
        num_blocks=NUM_BLOCKS,
        lease_ms=1000,
        host_route=address.route,
    )


def reservation_behind(endpoint: Endpoint, incarnation: int = 7) -> Reservation:
    """The same where only a TCP address is known."""
    return reservation_at(DataAddress(endpoint, None), incarnation)


@contextlib.asynccontextmanager
async def running_pair(
    send: SendOptions | None = None,
    receive: ReceiveOptions | None = None,
    devices: tuple[bool, bool] = (False, False),
    device_pool: Callable[..., FilledPool] = TwinPool,
) -> AsyncIterator[Pair]:
    """Both ends; checks at the end that each grant ended exactly once.

    Args:
        devices: whether the sender's pool, and the receiver's, is on a device.
        device_pool: makes such a pool of a layout, a number of blocks and, it may be, content.
    """
    send = send or SendOptions(kinds=("tcp",), lanes=2)
    send = replace(send, connect_timeout_s=5)
    hub = LocalHub()
    source: SourcePool | FilledPool = SourcePool()
    target = RecordingTarget()
    if devices[0]:
        source.close()
        source = device_pool(LAYOUT, NUM_BLOCKS, _content(NUM_BLOCKS * BLOCK, 0))
    if devices[1]:
        target.pool.close()
        target.pool = device_pool(LAYOUT, NUM_BLOCKS)
    server = DataServer(RECEIVER, target, receive or ReceiveOptions(), memory=target.pool, hub=hub)
    samples: list[TransferSample] = []
    pool = ChannelPool(SENDER, source, send, hub=hub, observer=samples.append)
    try:
        reservation = reservation_at(await server.start())
        yield Pair(source, target, server, pool, reservation, samples, send.kinds[0])
    finally:
        await pool.close()
        await server.close()
        for each in (source, target.pool):
            each.close()
            if isinstance(each, TwinPool):
                assert each.driver.pinned_bytes == 0
                await until(lambda driver=each.driver: driver.num_open == 0)  # type: ignore[misc]
        target.check_grants_ended_once()


def tcp_pair(stall_timeout_s: float = STALL_S) -> AbstractAsyncContextManager[Pair]:
    """Both ends over two TCP connections, which wait so long for each other."""
    return running_pair(
        SendOptions(kinds=("tcp",), lanes=2, stall_timeout_s=stall_timeout_s),
        ReceiveOptions(stall_timeout_s=stall_timeout_s),
    )


async def until(fact: Callable[[], bool]) -> None:
    """Lets the loop turn until something is true; the test's own timeout bounds it."""
    while not fact():
        await asyncio.sleep(0)


def whole(count: int, first: int = 0) -> list[Run]:
    """One run: the same numbers on both sides."""
    return [Run(first, first, count)]
