"""Reads of segments as this replica sees them: noted at each lookup, counted in the background.

A lookup costs only one append. If notes arrive faster than they are counted, the oldest are
dropped. Tests: tests/unit/kvmanager/test_heat.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvmesh.core.types import BLOCK_HASH_BYTES
from kvmesh.policy.heat import CooledPrefix, HeatTable, SegmentHeat
from services.kvmanager import metrics

MAX_NOTES = 2048
"""Maximum number of lookups that wait to be counted."""

MAX_NOTED_BLOCKS = 4096
"""Maximum number of blocks counted per prefix.

It limits the waiting notes to 128 MiB; in practice they are far smaller.
"""

NOTES_AT_ONCE = 16
"""Number of notes counted before lookups run again. A note of 8,000 tokens takes about 10 us."""


class HeatBoard:
    """One heat table per namespace.

    Args:
        make_table: makes an empty table.
    """

    def __init__(self, make_table: Callable[[], HeatTable]) -> None:
        self._make_table = make_table
        self._tables: dict[str, HeatTable] = {}
        self._notes: deque[tuple[str, bytes]] = deque(maxlen=MAX_NOTES)
        self._noted = self._counted = 0

    def note(self, namespace: str, hashes: bytes, num_blocks: int) -> None:
        """Notes a lookup of these blocks that found the first `num_blocks`."""
        self._noted += 1
        end = min(num_blocks, MAX_NOTED_BLOCKS) * BLOCK_HASH_BYTES
        self._notes.append((namespace, hashes[:end]))

    async def count(self) -> None:
        """Counts the noted lookups."""
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
        """Multiplies all counts by `factor`, so that old reads weigh less."""
        for table in self._tables.values():
            table.fade(factor)
        self._tables = {name: table for name, table in self._tables.items() if len(table)}

    def cooled(self, low: float, high: float, count: int) -> dict[str, list[CooledPrefix]]:
        """Prefixes of each namespace whose end has a recent read count from `low` to `high`."""
        return {name: table.cooled(low, high, count) for name, table in self._tables.items()}

    def hottest(self, count: int) -> dict[str, list[SegmentHeat]]:
        """The most read segments of each namespace."""
        return {name: table.hottest(count) for name, table in self._tables.items()}
