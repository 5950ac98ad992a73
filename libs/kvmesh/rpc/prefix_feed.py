"""The scheduler's client of `KvManagerService.WatchPrefixes`: an index that follows the store.

A lookup needs no call. A broken feed continues from its position. If that is not possible, a new
index is filled beside the one in use and replaces it when it is exact.
Tests: tests/integration/test_prefix_feed.py.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from kvmesh.core.clock import Clock
from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.kv.hashing import join_hashes
from kvmesh.policy.holders import Holders
from kvmesh.policy.slot_index import SlotIndex
from kvmesh.rpc.channels import NO_ACCESS, MeshAccess, open_channel
from kvmesh.rpc.convert_slots import slot_change_from_proto
from kvmesh.rpc.direct import DirectClient
from kvmesh.rpc.stream import PeerStream
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1 import kv_manager_service_pb2 as pb
from kvmesh.v1 import kv_manager_service_pb2_grpc as pb_grpc

STALE_S = 10.0
"""Seconds that an index stays valid without a connection.

A kvmanager matches a silent worker for as long.
"""

TURN_S = 0.05
"""Seconds in which reads are gathered for one report, and ended slots for one sweep."""

SWEPT_AT_ONCE = 2000
"""Number of hashes examined in one event-loop iteration: about 0.5 ms."""

MAX_READS = 1024
"""Maximum number of reads that wait to be reported.

More are dropped: the counts are estimates anyway.
"""

log = event_logger(__name__)


class PrefixFeed:
    """Keeps an index up to date; needs `run` in a background task.

    Args:
        target: the kvmanager's `host:port`.
    """

    def __init__(self, target: str, clock: Clock, access: MeshAccess = NO_ACCESS) -> None:
        self._target = target
        self._clock = clock
        self._access = access
        self._index = SlotIndex()
        self._filling: SlotIndex | None = None
        self._position = ""
        self._cut_at = -math.inf
        self._reads: list[pb.PrefixRead] = []
        self._to_do = asyncio.Event()
        self._stream: PeerStream[pb.WatchPrefixesRequest, pb.WatchPrefixesResponse] | None = None

    @property
    def known(self) -> bool:
        """Whether the index equals the store, or did so within the last seconds."""
        return self._clock.now() - self._cut_at < STALE_S

    @property
    def num_blocks(self) -> int:
        """Number of hashes in the index."""
        return self._index.num_blocks

    def note_life(self, worker_id: WorkerId, incarnation: int | None) -> None:
        """Like `SlotIndex.note_life`."""
        self._index.note_life(worker_id, incarnation)
        if self._filling is not None:
            self._filling.note_life(worker_id, incarnation)

    def match(self, namespace: str, hashes: Sequence[BlockHash]) -> Holders:
        """The known holders of leading blocks. Reports found blocks to the kvmanager as read."""
        holders = self._index.match(namespace, hashes)
        if holders and len(self._reads) < MAX_READS:
            ((most, _),) = holders.longest(1)
            blocks = join_hashes(hashes[:most])
            self._reads.append(pb.PrefixRead(namespace=namespace, block_hashes=blocks))
            self._to_do.set()
        return holders

    async def run(self) -> None:
        """Connects, follows and reconnects until cancelled."""
        async with open_channel(self._target, self._access) as channel:
            stub = pb_grpc.KvManagerServiceStub(channel)
            self._stream = PeerStream(
                f"kvmanager@{self._target}",
                stub.WatchPrefixes,
                self._receive,
                on_up=self._greet,
                on_down=self._on_down,
                direct=DirectClient.of(self._target, pb.WatchPrefixesResponse, self._access.tls),
            )
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._stream.run(), name="prefix-feed")
                tasks.create_task(self._keep(), name="prefix-keep")

    async def _keep(self) -> None:
        while True:
            await self._to_do.wait()
            self._to_do.clear()
            await asyncio.sleep(TURN_S)
            reads, self._reads = self._reads, []
            if reads and self._stream is not None and self._stream.connected:
                told = pb.PrefixReads(reads=reads)
                self._stream.send(pb.WatchPrefixesRequest(reads=told))
            while self._index.needs_sweep:
                self._index.sweep(SWEPT_AT_ONCE)
                await asyncio.sleep(0)

    def _greet(self) -> None:
        assert self._stream is not None
        start = pb.WatchStart(position=self._position)
        self._stream.send(pb.WatchPrefixesRequest(start=start))

    def _on_down(self, reason: str) -> None:
        self._filling = None
        if self._cut_at == math.inf:
            self._cut_at = self._clock.now()

    def _receive(self, message: pb.WatchPrefixesResponse) -> None:
        if message.restart:
            self._filling = self._index.replacement()
            self._position = ""
        index = self._index if self._filling is None else self._filling
        for each in message.changes:
            index.apply(slot_change_from_proto(each))
        if self._index.needs_sweep:
            self._to_do.set()
        if not message.position:
            return
        self._position = message.position
        self._cut_at = math.inf
        if self._filling is not None:
            self._index, self._filling = self._filling, None
            self._to_do.set()
            log.info("prefix_index_filled", num_blocks=self._index.num_blocks)
