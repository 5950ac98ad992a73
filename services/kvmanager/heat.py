"""Reads of segments as this replica sees them: noted with each lookup, counted beside them.

A lookup pays for an append. Notes that come faster than they are counted push out the oldest ones.
Tests: tests/unit/kvmanager/test_heat.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvmesh.core.types import BLOCK_HASH_BYTES
from kvmesh.policy.heat import CooledPrefix, HeatTable, SegmentHeat
from services.kvmanager import metrics

MAX_NOTES = 2048
"""Lookups that wait to be counted."""

MAX_NOTED_BLOCKS = 4096
"""Blocks of one prefix that are counted: bounds what waits to 128 MiB, in truth far less."""

NOTES_AT_ONCE = 16
"""Notes counted before lookups get their turn: about 10 us each where 8,000 tokens were found."""


class HeatBoard:
    """A heat table for each namespace.

    Args:
        make_table: makes an empty one.
    """

    def __init__(self, make_table: Callable[[], HeatTable]) -> None:
        self._make_table = make_table
        self._tables: dict[str, HeatTable] = {}
        self._notes: deque[tuple[str, bytes]] = deque(maxlen=MAX_NOTES)
        self._noted = self._counted = 0

    def note(self, namespace: str, hashes: bytes, num_blocks: int) -> None:
        """Notes that someone asked for these blocks and the first `num_blocks` were found."""
        self._noted += 1
        end = min(num_blocks, MAX_NOTED_BLOCKS) * BLOCK_HASH_BYTES
        self._notes.append((namespace, hashes[:end]))

    async def count(self) -> None:
        """Counts what was noted."""
        dropped = self._noted - self._counted - len(self._notes)
        metrics.HEAT_NOTES_DROPPED.inc(dropped)
        self._counted += dropped
        while self._notes:
            for _ in range(min(NOTES_AT_ONCE, len(self._notes))):
                namespace, prefix = self._notes.popleft()
                table = self._tables.get(namespace)
                if table is None:
                    table = self._tables[namespace] = self._make_table()
                table.note(prefix)
                self._counted += 1
            await asyncio.sleep(0)

    def fade(self, factor: float) -> None:
        """Makes what was counted so far weigh less."""
        for table in self._tables.values():
            table.fade(factor)
        self._tables = {name: table for name, table in self._tables.items() if len(table)}

    def cooled(self, low: float, high: float, count: int) -> dict[str, list[CooledPrefix]]:
        """Prefixes of each namespace whose end was read so often of late."""
        return {name: table.cooled(low, high, count) for name, table in self._tables.items()}

    def hottest(self, count: int) -> dict[str, list[SegmentHeat]]:
        """The most read segments of each namespace."""
        return {name: table.hottest(count) for name, table in self._tables.items()}
