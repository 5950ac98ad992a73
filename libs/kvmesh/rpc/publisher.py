"""The worker's client of `KvManagerService.Publish`: reports the blocks that this worker holds.

Batches are numbered; a snapshot repairs a possible loss. Memory stays bounded while the kvmanager
is away, and the engine never waits for it.
Tests: tests/integration/test_publisher.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.core.errors import ProtocolError
from kvmesh.core.pool import CopyResult, PoolAnswer, PoolOrder, PoolReport
from kvmesh.core.types import BlockHash, WorkerId, WorkerInfo
from kvmesh.rpc.channels import NO_ACCESS, MeshAccess, open_channel
from kvmesh.rpc.convert_pool import (
    copy_result_to_proto,
    oldest_to_proto,
    pool_order_from_proto,
    pool_report_to_proto,
)
from kvmesh.rpc.direct import DirectClient
from kvmesh.rpc.stream import PeerStream
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1 import kv_manager_service_pb2 as pb
from kvmesh.v1 import kv_manager_service_pb2_grpc as pb_grpc
from kvmesh.v1 import pool_types_pb2

log = event_logger(__name__)

MAX_HASHES_PER_MESSAGE = 64 * 1024
"""Maximum number of hashes per message: 1 MiB, far below the message limit."""

MAX_UNACKED_BATCHES = 32
"""Maximum number of unacknowledged batches.

If the service is slower, changes are dropped, and a snapshot replaces them when all acks have
arrived.
"""

REPORT_S = 0.5
"""Seconds between two checks of the worker's report to the pool."""

FLUSH_DELAY_S = 0.02
"""Seconds that the first change waits for others to share its message, as in a report of load."""

MIN_GAP_S = 0.1
"""Minimum seconds between two messages of changes.

A busy worker fills blocks in every step. A message costs the control plane more than its blocks do.
"""


class BlockEvents(Protocol):
    """Net changes of the published names (`core/block_names.py`) since the last call."""

    @property
    def stored(self) -> Sequence[BlockHash]:
        """Names that are held now and were not before."""
        ...

    @property
    def removed(self) -> Sequence[BlockHash]:
        """Names that are no longer held."""
        ...


@dataclass(frozen=True, slots=True)
class PublisherFacts:
    """The identity of the publisher.

    Attributes:
        namespace: the layout's model fingerprint.
    """

    worker_id: WorkerId
    incarnation: int
    cluster: str
    namespace: str
    block_size: int

    @classmethod
    def of(cls, info: WorkerInfo) -> PublisherFacts:
        """Returns those of a worker."""
        layout = info.layout
        name = layout.model_fingerprint
        return cls(info.worker_id, info.incarnation, info.cluster, name, layout.block_size)


class PoolEnd(Protocol):
    """The worker as a member of the pool. Called on the event loop."""

    def report(self) -> PoolReport:
        """The worker's room for copies and its reads."""
        ...

    def take(self, order: PoolOrder) -> None:
        """Accepts an order; returns at once."""
        ...


class BlockPublisher:
    """Publishes one worker's blocks until its `run` is cancelled.

    Args:
        target: the kvmanager's `host:port`.
        take_events: called on the event loop; returns the changes so far and forgets them.
        held_hashes: called on the event loop; returns all names that `take_events` has reported and
            that are still held.
        interval_s: longest time between two messages; well below the service's lease.
        pool: without it the worker is not a member of the pool and gets no orders.
    """

    def __init__(
        self,
        target: str,
        facts: PublisherFacts,
        *,
        take_events: Callable[[], BlockEvents],
        held_hashes: Callable[[], Sequence[BlockHash]],
        interval_s: float = 2.0,
        access: MeshAccess = NO_ACCESS,
        pool: PoolEnd | None = None,
    ) -> None:
        self._pool = pool
        self._reported: PoolReport | None = None
        self._target = target
        self._facts = facts
        self._access = access
        self._take_events = take_events
        self._held_hashes = held_hashes
        self._interval_s = interval_s
        self._wake = asyncio.Event()
        self._sequence = 0
        self._acked = 0
        self._snapshot_due = False
        self._stream: PeerStream[pb.PublishRequest, pb.PublishResponse] | None = None
        self.num_snapshots = 0

    @property
    def connected(self) -> bool:
        """Whether the kvmanager is connected."""
        return self._stream is not None and self._stream.connected

    @property
    def sequence(self) -> int:
        """Number of the last batch or snapshot that was sent."""
        return self._sequence

    @property
    def is_exact(self) -> bool:
        """Whether the service confirmed everything that was sent."""
        return self._acked == self._sequence and not self._snapshot_due

    def notify(self) -> None:
        """Notes that blocks changed: they are published 20 ms later, or at the next `MIN_GAP_S`."""
        self._wake.set()

    async def run(self) -> None:
        """Connects, publishes and reconnects until cancelled."""
        async with open_channel(self._target, self._access) as channel:
            stub = pb_grpc.KvManagerServiceStub(channel)
            self._stream = PeerStream(
                f"kvmanager@{self._target}",
                stub.Publish,
                self._receive,
                on_up=self._greet,
                direct=DirectClient.of(self._target, pb.PublishResponse, self._access.tls),
            )
            async with asyncio.TaskGroup() as group:
                group.create_task(self._stream.run(), name="publisher-stream")
                group.create_task(self._flush_often(), name="publisher-flush")
                if self._pool is not None:
                    group.create_task(self._report_often(self._pool), name="publisher-pool")

    def answer_order(self, answer: PoolAnswer) -> None:
        """Sends the answer to an order. Does nothing without a connection."""
        if not self.connected:
            return
        if isinstance(answer, CopyResult):
            self._send(copied=copy_result_to_proto(answer))
        else:
            self._send(oldest=pool_types_pb2.OldestBlocks(tiers=oldest_to_proto(answer)))

    async def _report_often(self, pool: PoolEnd) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            report = pool.report()
            if self.connected and report != self._reported:
                self._reported = report
                self._send(pool=pool_report_to_proto(report))

    async def _flush_often(self) -> None:
        now = asyncio.get_running_loop().time
        flushed_at = now() - MIN_GAP_S
        while True:
            with contextlib.suppress(TimeoutError):
                # Not `wait_for`: in Python 3.11 it can lose a cancel.
                async with asyncio.timeout(self._interval_s):
                    await self._wake.wait()
                await asyncio.sleep(max(FLUSH_DELAY_S, flushed_at + MIN_GAP_S - now()))
            self._wake.clear()
            self._flush()
            flushed_at = now()

    def _flush(self) -> None:
        """Sends the changes, with no await between taking them from the pool and sending them."""
        events = self._take_events()
        changed = bool(events.stored or events.removed)
        if changed and not self._can_send(events):
            self._snapshot_due = True
        if not self.connected:
            return
        if self._snapshot_due and self._acked == self._sequence:
            self._send_snapshot()
        elif changed and not self._snapshot_due:
            self._send_events(events)
        else:
            self._send(heartbeat=pb.PublisherHeartbeat(sequence=self._sequence))

    def _can_send(self, events: BlockEvents) -> bool:
        return (
            self.connected
            and self._sequence - self._acked < MAX_UNACKED_BATCHES
            and len(events.stored) + len(events.removed) <= MAX_HASHES_PER_MESSAGE
        )

    def _send_events(self, events: BlockEvents) -> None:
        self._sequence += 1
        self._send(
            events=pb.BlockEvents(
                sequence=self._sequence,
                stored=b"".join(events.stored),
                removed=b"".join(events.removed),
            )
        )

    def _send_snapshot(self) -> None:
        held = self._held_hashes()
        self._sequence += 1
        starts = range(0, max(len(held), 1), MAX_HASHES_PER_MESSAGE)
        for start in starts:
            self._send(
                snapshot=pb.BlockSnapshot(
                    sequence=self._sequence,
                    held=b"".join(held[start : start + MAX_HASHES_PER_MESSAGE]),
                    first=start == starts[0],
                    last=start == starts[-1],
                )
            )
        self._snapshot_due = False
        self.num_snapshots += 1
        log.info("snapshot_sent", sequence=self._sequence, num_blocks=len(held))

    def _send(
        self,
        *,
        hello: pb.PublisherHello | None = None,
        events: pb.BlockEvents | None = None,
        snapshot: pb.BlockSnapshot | None = None,
        heartbeat: pb.PublisherHeartbeat | None = None,
        pool: pool_types_pb2.PoolReport | None = None,
        copied: pool_types_pb2.CopyResult | None = None,
        oldest: pool_types_pb2.OldestBlocks | None = None,
    ) -> None:
        assert self._stream is not None, "run has not begun"
        self._stream.send(
            pb.PublishRequest(
                hello=hello,
                events=events,
                snapshot=snapshot,
                heartbeat=heartbeat,
                pool=pool,
                copied=copied,
                oldest=oldest,
            )
        )

    def _greet(self) -> None:
        facts = self._facts
        self._send(
            hello=pb.PublisherHello(
                worker_id=facts.worker_id,
                incarnation=facts.incarnation,
                cluster=facts.cluster,
                namespace=facts.namespace,
                block_size=facts.block_size,
            )
        )
        if self._pool is not None:
            self._reported = self._pool.report()
            self._send(pool=pool_report_to_proto(self._reported))
        # If all was acknowledged, the heartbeat finds out whether the service still knows this
        # worker. Otherwise it is unknown what arrived.
        if self._acked != self._sequence:
            self._order_snapshot()
        self._wake.set()

    def _order_snapshot(self) -> None:
        """Makes a snapshot due now: earlier messages will not be acknowledged any more."""
        self._acked = self._sequence
        self._snapshot_due = True
        self._wake.set()

    def _receive(self, message: pb.PublishResponse) -> None:
        match message.WhichOneof("message"):
            case "ack":
                self._acked = max(self._acked, message.ack.sequence)
                if self._snapshot_due:
                    self._wake.set()
            case "resync":
                log.info("resync_ordered", reason=message.resync.reason)
                self._order_snapshot()
            case "order":
                self._take_order(message.order)

    def _take_order(self, message: pool_types_pb2.PoolOrder) -> None:
        try:
            order = pool_order_from_proto(message)
        except ProtocolError as error:
            log.warning("bad_order", error=str(error))
            return
        if self._pool is not None and order is not None:
            self._pool.take(order)
