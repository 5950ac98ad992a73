"""Pushes the fleet to watchers: who came or left at once, loads a few times a second.

Tests: tests/unit/scheduler/test_feed.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from kvmesh.core.types import ModelDetail
from kvmesh.rpc.convert import fleet_worker_to_proto
from kvmesh.rpc.convert_detail import model_detail_to_proto
from kvmesh.v1.scheduler_service_pb2 import WatchFleetResponse
from services.scheduler.fleet import Fleet

LOAD_INTERVAL_S = 0.1
"""Least time between two messages to one watcher when only loads changed."""


class FleetFeed:
    """Wakes whoever follows the fleet; call `changed` after everything that may have changed it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._woken_at = fleet.version
        self._change = asyncio.Event()
        self._messages: dict[bool, WatchFleetResponse] = {}
        self.models: Callable[[], Iterable[ModelDetail]] = tuple
        """Reads what the planner says, for watchers that want details."""

    def changed(self) -> None:
        """Wakes the followers if the fleet's version grew."""
        if self._fleet.version != self._woken_at:
            self._woken_at = self._fleet.version
            self._change.set()
            self._change = asyncio.Event()

    async def wait_past(self, version: int) -> None:
        """Waits until the fleet is newer than `version`."""
        while self._fleet.version <= version:
            await self._change.wait()

    async def wait_urgent_past(self, version: int) -> None:
        """Waits until a worker came, left or began to drain after `version`."""
        while self._fleet.urgent_version <= version:
            await self._change.wait()

    async def views(
        self, hold_empty_s: float, *, with_detail: bool = False
    ) -> AsyncIterator[WatchFleetResponse]:
        """The fleet now, then again after every change.

        Args:
            hold_empty_s: how long an empty first view is held back: a scheduler that has just
                started knows nobody yet, which is not news to a gateway with an older view.
            with_detail: whether to send what is of use to people only.
        """
        if not len(self._fleet):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(hold_empty_s):
                    await self.wait_past(self._fleet.version)
        while True:
            version = self._fleet.version
            yield self._current_message(with_detail)
            await self.wait_past(version)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOAD_INTERVAL_S):
                    await self.wait_urgent_past(version)

    def _current_message(self, with_detail: bool) -> WatchFleetResponse:
        # One message per version for all watchers of a kind.
        message = self._messages.get(with_detail)
        if message is None or message.version != self._fleet.version:
            workers = self._fleet.workers()
            message = self._messages[with_detail] = WatchFleetResponse(
                version=self._fleet.version,
                workers=[fleet_worker_to_proto(each, with_detail=with_detail) for each in workers],
                models=map(model_detail_to_proto, self.models()) if with_detail else (),
            )
        return message
