"""Counts recent reads of each segment of the pool, in bounded memory.

A segment's name is the hash of its last block. The segment stores its own blocks and its parent's
name, so requests with a common prefix share its entries. Reading a segment reads all before it.
Therefore a parent's count is never below a child's, a segment is dropped only after its children,
and `hottest` returns each segment together with its parents. Source: TokenLake 4.3.
Tests: tests/unit/policy/test_heat.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from kvmesh.core.types import BLOCK_HASH_BYTES, BlockHash

FADED_READS = 0.05
"""Number of recent reads below which a segment is dropped."""

FADE = 0.5
"""Factor on all counts from one window to the next."""

WINDOW_S = 10.0
"""Seconds of a window, unless the caller says otherwise."""

COLD_READS = 1 / 8
"""Read count below which a segment is cold.

Its last read was four windows ago, or longer after many reads.
"""

SEGMENT_BLOCKS = 16
"""Blocks per segment, unless the caller says otherwise."""

MAX_SEGMENTS = 8192
"""Segments whose reads are remembered, per model, unless a table is made with another bound."""

KEPT_SHARE = 3 / 4
"""Fraction of a full table that is kept when the coldest segments are dropped."""


@dataclass(slots=True)
class SegmentHeat:
    """A segment and its reads.

    Attributes:
        parent: name of the segment before it; None for the first of a prefix.
        blocks: its own block hashes, joined.
        depth: number of segments before it.
        reads: recent reads; see `HeatTable.fade`.
    """

    name: BlockHash
    parent: BlockHash | None
    blocks: bytes
    depth: int
    reads: float


@dataclass(frozen=True, slots=True)
class CooledPrefix:
    """A prefix whose end is no longer read.

    Attributes:
        prefix: its block hashes, joined.
        own_blocks: number of blocks at its end that are cold; the blocks before them are still
            read, or belong to another cooled prefix.
    """

    prefix: bytes
    own_blocks: int

    @property
    def name(self) -> BlockHash:
        """Name of its last segment."""
        return BlockHash(self.prefix[-BLOCK_HASH_BYTES:])


class HeatTable:
    """Reads by segment.

    Args:
        segment_blocks: blocks per segment; an incomplete last segment is not counted.
        max_segments: maximum size of the table; beyond it the least read quarter is dropped, deeper
            segments before their parents.
    """

    def __init__(self, segment_blocks: int, max_segments: int) -> None:
        assert segment_blocks > 0, f"{segment_blocks} blocks per segment"
        assert max_segments > 0, f"{max_segments} segments"
        self._segment_bytes = segment_blocks * BLOCK_HASH_BYTES
        self._max_segments = max_segments
        self._segments: dict[BlockHash, SegmentHeat] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def get(self, name: BlockHash) -> SegmentHeat | None:
        """Returns the segment; None if it was not read recently."""
        return self._segments.get(name)

    def note(self, prefix: bytes, weight: float = 1.0) -> None:
        """Counts a read of a prefix.

        Args:
            prefix: joined hashes of the found blocks, from the first one.
            weight: number of reads to add.
        """
        size, segments = self._segment_bytes, self._segments
        parent: BlockHash | None = None
        for depth, start in enumerate(range(0, len(prefix) - size + 1, size)):
            end = start + size
            name = BlockHash(prefix[end - BLOCK_HASH_BYTES : end])
            segment = segments.get(name)
            if segment is None:
                segments[name] = SegmentHeat(name, parent, prefix[start:end], depth, weight)
            else:
                segment.reads += weight
            parent = name
        if len(segments) > self._max_segments:
            self._drop_coldest()

    def merge(self, segments: Iterable[SegmentHeat]) -> None:
        """Adds the counts of another table's `hottest`."""
        for other in segments:
            mine = self._segments.get(other.name)
            if mine is not None:
                mine.reads += other.reads
            elif other.parent is None or other.parent in self._segments:
                self._segments[other.name] = SegmentHeat(
                    other.name, other.parent, other.blocks, other.depth, other.reads
                )
        if len(self._segments) > self._max_segments:
            self._drop_coldest()

    def fade(self, factor: float) -> None:
        """Multiplies all counts by a factor, and drops segments below `FADED_READS`."""
        kept: dict[BlockHash, SegmentHeat] = {}
        for name, segment in self._segments.items():
            segment.reads *= factor
            if segment.reads >= FADED_READS:
                kept[name] = segment
        self._segments = kept

    def hottest(self, count: int) -> list[SegmentHeat]:
        """Returns the `count` most read segments; each comes after its parent."""
        # Plain numbers first: comparing whole segments would take as long as the rest together.
        reads = heapq.nlargest(count, [each.reads for each in self._segments.values()])
        least = reads[-1] if reads else 0.0
        found = [each for each in self._segments.values() if each.reads >= least]
        found.sort(key=_heat_order)
        return found[:count]

    def cooled(self, low: float, high: float, limit: int) -> list[CooledPrefix]:
        """Returns the prefixes whose end has at least `low` and less than `high` recent reads.

        If `low` / `high` is the factor of `fade`, a segment without reads is returned once.

        Args:
            limit: maximum number of prefixes; the longest are left out.
        """
        cool = {name for name, each in self._segments.items() if low <= each.reads < high}
        parents = {self._segments[name].parent for name in cool}
        ends = sorted(
            (self._segments[name] for name in cool if name not in parents),
            key=lambda each: (each.depth, each.name),
        )
        found: list[CooledPrefix] = []
        for end in ends[:limit]:
            own_bytes, at = 0, end
            while True:
                cool.discard(at.name)
                own_bytes += len(at.blocks)
                if at.parent is None or at.parent not in cool:
                    break
                at = self._segments[at.parent]
            found.append(CooledPrefix(self.prefix(end.name), own_bytes // BLOCK_HASH_BYTES))
        return found

    def prefix(self, name: BlockHash) -> bytes:
        """Returns the joined hashes of all blocks up to the end of a segment of the table."""
        parts: list[bytes] = []
        at: BlockHash | None = name
        while at is not None:
            segment = self._segments[at]
            parts.append(segment.blocks)
            at = segment.parent
        return b"".join(reversed(parts))

    def _drop_coldest(self) -> None:
        """Drops the coldest quarter of the table, and all segments that tie with its hottest."""
        ranks = sorted(map(_rank, self._segments.values()))
        limit = ranks[len(ranks) - int(self._max_segments * KEPT_SHARE) - 1]
        self._segments = {
            name: each for name, each in self._segments.items() if _rank(each) > limit
        }


def _rank(segment: SegmentHeat) -> float:
    """Returns a sort key that grows with the reads; a parent's is always above its child's."""
    return segment.reads - segment.depth * 1e-7


def _heat_order(segment: SegmentHeat) -> tuple[float, int, bytes]:
    # Parents come first among equal counts; the name makes the order deterministic.
    return -segment.reads, segment.depth, segment.name
