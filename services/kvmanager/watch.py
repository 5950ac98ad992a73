"""One scheduler's WatchPrefixes stream: a picture of the store, then its log as it grows.

Tests: tests/integration/test_prefix_feed.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from kvmesh.core.slots import Slot, SlotChange, SlotChanges
from kvmesh.rpc.convert_slots import slot_change_to_proto
from kvmesh.v1 import kv_manager_service_pb2 as pb
from services.kvmanager.guard import StoreGuard

WAIT_S = 1.0
"""Seconds to wait for a change, before checking whether the log still has the position."""

GATHER_S = 0.02
"""Seconds in which changes share a message."""


class PrefixWatch:
    """Serves one watcher.

    Raises:
        StoreUnavailableError: from `told`; the watcher reconnects and continues from its position.
    """

    def __init__(self, guard: StoreGuard) -> None:
        self._guard = guard

    async def told(self, position: str) -> AsyncIterator[pb.WatchPrefixesResponse]:
        """Yields all messages for the watcher, without end.

        Args:
            position: the watcher's position in the log; empty if it has none.
        """
        wait_s = 0.0
        while True:
            found = await self._after(position, wait_s) if position else None
            if found is None:
                async for part in self._picture():
                    yield part
                    position = part.position
            elif found.changes or not wait_s:
                position = found.position
                yield _message(found.changes, position)
                await asyncio.sleep(GATHER_S)
            wait_s = WAIT_S

    async def _after(self, position: str, wait_s: float) -> SlotChanges | None:
        return await self._guard.call(lambda store: store.changes_after(position, wait_s))

    async def _picture(self) -> AsyncIterator[pb.WatchPrefixesResponse]:
        """Yields the whole content of the store, then the changes during that time.

        The parts may be of different moments. The last message has a position; if it has none, the
        log has dropped the changes, and the caller makes another picture.
        """
        position = await self._guard.call(lambda store: store.position())
        slots = await self._guard.call(lambda store: store.slots())
        yield pb.WatchPrefixesResponse(restart=True, changes=map(slot_change_to_proto, slots))
        for each in slots:
            cursor, is_first = 0, True
            while cursor or is_first:
                cursor, held = await self._held(each.slot, cursor)
                is_first = False
                if held:
                    yield _message([SlotChange(each.slot, stored=held)])
        while (found := await self._after(position, 0.0)) is not None:
            position = found.position
            if not found.changes:
                yield _message((), position)
                return
            yield _message(found.changes)

    async def _held(self, slot: Slot, cursor: int) -> tuple[int, bytes]:
        return await self._guard.call(lambda store: store.held(slot, cursor))


def _message(changes: Iterable[SlotChange], position: str = "") -> pb.WatchPrefixesResponse:
    return pb.WatchPrefixesResponse(position=position, changes=map(slot_change_to_proto, changes))
