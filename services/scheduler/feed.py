"""Pushes the fleet to watchers: arrivals and departures at once, loads a few times a second.

Only changes follow a full view: sending a large fleet many times a second would keep the scheduler
and its watchers busy. Tests: tests/unit/scheduler/test_feed.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from kvmesh.core.details import ModelDetail
from kvmesh.core.empty_spare import EmptySpare
from kvmesh.rpc.convert_detail import model_detail_to_proto
from kvmesh.rpc.convert_empty import empty_spare_to_proto
from kvmesh.rpc.convert_worker import fleet_worker_to_proto
from kvmesh.v1.scheduler_service_pb2 import WatchFleetResponse
from services.scheduler.fleet import Fleet
from services.scheduler.fleet_changes import FleetChange, FleetChanges

LOAD_INTERVAL_S = 0.1
"""Minimum seconds between two messages to one watcher if only loads changed."""


class FleetFeed:
    """Wakes the watchers of the fleet. Call `changed` after every possible change of the fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._woken_at = fleet.version
        self._change = asyncio.Event()
        self._messages: dict[tuple[bool, int], WatchFleetResponse] = {}
        self.models: Callable[[], Iterable[ModelDetail]] = tuple
        """Returns the planner's details, for watchers that want details."""
        self.empty_spares: Callable[[], Iterable[EmptySpare]] = tuple
        """Returns the workers without a model, for details."""
        self.kvmanager: Callable[[], bool | None] = lambda: None
        """Returns whether the kvmanager is connected, for details; None without a kvmanager."""

    def changed(self) -> None:
        """Wakes the watchers if the fleet's version grew."""
        if self._fleet.version != self._woken_at:
            self._woken_at = self._fleet.version
            self._change.set()
            self._change = asyncio.Event()

    async def wait_past(self, version: int) -> None:
        """Waits until the fleet is newer than `version`."""
        while self._fleet.version <= version:
            await self._change.wait()

    async def wait_urgent_past(self, version: int) -> None:
        """Waits until a worker arrived, left or began to drain after `version`."""
        while self._fleet.urgent_version <= version:
            await self._change.wait()

    async def views(
        self, hold_empty_s: float, *, with_detail: bool = False, changes: bool = False
    ) -> AsyncIterator[WatchFleetResponse]:
        """Yields the fleet now, then again after every change.

        Args:
            hold_empty_s: seconds to hold back an empty first view. A scheduler that has just
                started knows no workers yet, and a gateway with an older view must not drop its
                own.
            with_detail: whether to send details that only people need.
            changes: whether later views contain only the changes since the view before.
        """
        if not len(self._fleet):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(hold_empty_s):
                    await self.wait_past(self._fleet.version)
        base = 0
        while True:
            version = self._fleet.version
            yield self._message(with_detail, base)
            if changes:
                base = version
            await self.wait_past(version)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOAD_INTERVAL_S):
                    await self.wait_urgent_past(version)

    def _message(self, with_detail: bool, base: int) -> WatchFleetResponse:
        """The fleet now, or its changes since version `base`.

        Watchers with the same options and version share one message.
        """
        version = self._fleet.version
        if any(message.version != version for message in self._messages.values()):
            self._messages.clear()
        message = self._messages.get((with_detail, base))
        if message is None:
            message = WatchFleetResponse(
                version=version,
                models=map(model_detail_to_proto, self.models()) if with_detail else (),
                kvmanager_connected=self.kvmanager() if with_detail else None,
                empty_workers=map(empty_spare_to_proto, self.empty_spares()) if with_detail else (),
            )
            changes = self._fleet.changes_since(base) if base else None
            if changes is None:
                whole = (FleetChange(each, is_new=True) for each in self._fleet.workers())
                changes = FleetChanges(tuple(whole), ())
            else:
                message.base_version = base
            message.gone.extend(changes.gone)
            message.workers.extend(
                fleet_worker_to_proto(each.worker, with_detail=with_detail, with_info=each.is_new)
                for each in changes.workers
            )
            self._messages[with_detail, base] = message
        return message
