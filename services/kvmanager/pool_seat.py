"""A connected worker's place in the pool: its reports, its reads, and the stream for its orders.

Tests: tests/unit/kvmanager/test_pool.py.
"""

from __future__ import annotations

from kvmesh.core.pool import CopyResult, OldBlocks, OldestOrder, PoolMember, PoolReport
from kvmesh.core.slots import Publisher
from kvmesh.rpc.convert_pool import (
    copy_result_from_proto,
    oldest_from_proto,
    pool_order_to_proto,
    pool_report_from_proto,
)
from kvmesh.rpc.outbox import Outbox
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1 import kv_manager_service_pb2 as pb
from kvmesh.v1 import pool_types_pb2
from services.kvmanager import metrics

log = event_logger(__name__)


class PoolSeat:
    """The seat of one publisher. Without a report, the worker is not a member of the pool."""

    def __init__(self, publisher: Publisher, outbox: Outbox[pb.PublishResponse]) -> None:
        self.publisher = publisher
        self._outbox = outbox
        self._report: PoolReport | None = None
        self._read_blocks = 0.0
        self._oldest: tuple[OldBlocks, ...] = ()

    @property
    def member(self) -> PoolMember | None:
        """The worker as planners see it; None without a report."""
        if self._report is None:
            return None
        who = self.publisher
        return PoolMember(
            who.worker_id,
            who.incarnation,
            who.cluster,
            who.namespace,
            self._report,
            self._read_blocks,
            self._oldest,
        )

    def handle(self, message: pb.PublishRequest) -> bool:
        """Handles a message that concerns the pool; returns False for other messages.

        Raises:
            ProtocolError: the message breaks the contract.
        """
        match message.WhichOneof("message"):
            case "pool":
                self._take_report(pool_report_from_proto(message.pool))
            case "copied":
                self._take_result(copy_result_from_proto(message.copied))
            case "oldest":
                self._oldest = oldest_from_proto(message.oldest.tiers)
            case _:
                return False
        return True

    def order(self, order: pool_types_pb2.PoolOrder) -> None:
        """Sends an order to the worker."""
        self._outbox.put(pb.PublishResponse(order=order))

    def ask_oldest(self, order: OldestOrder) -> None:
        """Asks the worker which blocks leave it next; what it said before is forgotten."""
        self._oldest = ()
        if self._report is not None:
            self.order(pool_order_to_proto(order))

    def fade(self, factor: float) -> None:
        """Multiplies the reads so far by `factor`, so that old reads weigh less."""
        self._read_blocks *= factor

    def _take_report(self, report: PoolReport) -> None:
        # Reads before the first report were counted by another replica, or are old.
        if self._report is not None:
            self._read_blocks += max(report.read_blocks_total - self._report.read_blocks_total, 0)
        self._report = report

    def _take_result(self, result: CopyResult) -> None:
        metrics.POOL_COPIES.labels(result.outcome.value, result.reason).inc()
        metrics.POOL_COPIED_BYTES.inc(result.num_bytes)
        log.info(
            "pool_copy",
            worker_id=self.publisher.worker_id,
            order_id=result.order_id,
            outcome=result.outcome.value,
            reason=result.reason,
            num_blocks=result.num_blocks,
            num_bytes=result.num_bytes,
        )
