"""Keeps the fleet in a store over restarts of the scheduler. Failures are only logged.

Tests: tests/unit/scheduler/test_registry.py.
"""

from __future__ import annotations

import asyncio
import contextlib

from google.protobuf.message import DecodeError

from kvmesh.core.clock import Clock
from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import WorkerId, WorkerInfo
from kvmesh.metadata.store import FleetStore, StoreUnavailableError
from kvmesh.rpc.convert_worker import worker_info_from_proto, worker_info_to_proto
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1 import types_pb2
from services.scheduler import metrics
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Fleet

TTL_LEASES = 10
"""Number of leases that an entry outlives its last write, so that a scheduler can restart."""

log = event_logger(__name__)


class DurableRegistry:
    """Keeps the store equal to the fleet's confirmed members."""

    def __init__(
        self, store: FleetStore, fleet: Fleet, feed: FleetFeed, clock: Clock, lease_s: float
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._feed = feed
        self._clock = clock
        self._lease_s = lease_s
        self._written: dict[WorkerId, tuple[WorkerInfo, float]] = {}

    async def restore(self) -> int:
        """Fills the fleet with remembered workers. Returns their number."""
        try:
            entries = await self._store.list_workers()
        except StoreUnavailableError as error:
            self._note_failure("fleet_not_restored", error)
            return 0
        count = 0
        for payload in entries.values():
            try:
                info = worker_info_from_proto(types_pb2.WorkerInfo.FromString(payload))
            except (ProtocolError, DecodeError) as error:
                self._note_failure("entry_not_restored", error)
                continue
            count += self._fleet.restore(info, self._clock.now())
        self._feed.changed()
        return count

    async def run(self) -> None:
        """Writes changes when they happen, and everything once per lease."""
        while True:
            version = self._fleet.urgent_version
            try:
                await self.sync()
            except StoreUnavailableError as error:
                self._note_failure("fleet_not_saved", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s):
                    await self._feed.wait_urgent_past(version)

    async def sync(self) -> None:
        """Writes members that are new or due, and removes those that left."""
        now = self._clock.now()
        # Workers that never served are not remembered as if they had.
        held = self._fleet.held
        members = {
            info.worker_id: info for info in self._fleet.confirmed() if info.worker_id not in held
        }
        for worker_id, info in members.items():
            before = self._written.get(worker_id)
            if before is not None and before[0] == info and now - before[1] < self._lease_s:
                continue
            payload = worker_info_to_proto(info).SerializeToString()
            await self._store.put_worker(worker_id, payload, self._lease_s * TTL_LEASES)
            self._written[worker_id] = (info, now)
        for worker_id in tuple(self._written.keys() - members.keys()):
            await self._store.remove_worker(worker_id)
            del self._written[worker_id]

    def _note_failure(self, event: str, error: Exception) -> None:
        metrics.STORE_FAILURES.inc()
        log.warning(event, error=str(error))
