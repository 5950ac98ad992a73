"""How often each segment of the pool is read of late, in bounded memory.

A segment is named by the hash of its last block and knows its own blocks and the segment before it,
so a table needs as much room for a long prompt as the prompt has segments, however many requests
share its beginning. Reading a segment reads all before it: a parent's count is never below a
child's, what is dropped for want of room has no children left, and what `hottest` gives is closed
under parents. Source: TokenLake 4.3. Tests: tests/unit/policy/test_heat.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from kvmesh.core.types import BLOCK_HASH_BYTES, BlockHash

FADED_READS = 0.05
"""A segment read less than so often of late is forgotten."""

KEPT_SHARE = 3 / 4
"""Part of the table that stays when it is full."""


@dataclass(slots=True)
class SegmentHeat:
    """A segment and its reads.

    Attributes:
        parent: the segment before it; None for the first of a prefix.
        blocks: its own block hashes, joined.
        depth: segments before it.
        reads: of late; see `HeatTable.fade`.
    """

    name: BlockHash
    parent: BlockHash | None
    blocks: bytes
    depth: int
    reads: float


@dataclass(frozen=True, slots=True)
class CooledPrefix:
    """A prefix whose end is not read any more.

    Attributes:
        prefix: its block hashes, joined.
        own_blocks: of its end; what is before them is read still, or belongs to another one.
    """

    prefix: bytes
    own_blocks: int

    @property
    def name(self) -> BlockHash:
        """Of its last segment."""
        return BlockHash(self.prefix[-BLOCK_HASH_BYTES:])


class HeatTable:
    """Reads by segment.

    Args:
        segment_blocks: blocks per segment; what fills none is not counted.
        max_segments: bound of the table; beyond it the least read quarter is dropped, and deeper
            segments before those that they follow.
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
        """The segment, if it was read of late."""
        return self._segments.get(name)

    def note(self, prefix: bytes, weight: float = 1.0) -> None:
        """Counts a read of a prefix.

        Args:
            prefix: hashes of the blocks that were found, joined, from the first one.
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
        """Adds what another table gave as `hottest`."""
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
        """Multiplies all counts, and forgets what is hardly read any more."""
        kept: dict[BlockHash, SegmentHeat] = {}
        for name, segment in self._segments.items():
            segment.reads *= factor
            if segment.reads >= FADED_READS:
                kept[name] = segment
        self._segments = kept

    def hottest(self, count: int) -> list[SegmentHeat]:
        """The `count` most read segments; each comes after its parent."""
        # Plain numbers first: comparing whole segments would take as long as all else together.
        reads = heapq.nlargest(count, [each.reads for each in self._segments.values()])
        least = reads[-1] if reads else 0.0
        found = [each for each in self._segments.values() if each.reads >= least]
        found.sort(key=_heat_order)
        return found[:count]

    def cooled(self, low: float, high: float, limit: int) -> list[CooledPrefix]:
        """Prefixes whose end was read at least `low` and less than `high` times of late.

        With the factor of `fade` between the two, a segment that nobody reads is among them once.

        Args:
            limit: of the answer; the longest prefixes are left out.
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
        """Hashes of all blocks up to the end of a segment of the table, joined."""
        parts: list[bytes] = []
        at: BlockHash | None = name
        while at is not None:
            segment = self._segments[at]
            parts.append(segment.blocks)
            at = segment.parent
        return b"".join(reversed(parts))

    def _drop_coldest(self) -> None:
        """Drops a quarter of the table, and with the least cold of it all that is as cold."""
        ranks = sorted(map(_rank, self._segments.values()))
        limit = ranks[len(ranks) - int(self._max_segments * KEPT_SHARE) - 1]
        self._segments = {
            name: each for name, each in self._segments.items() if _rank(each) > limit
        }


def _rank(segment: SegmentHeat) -> float:
    """Grows with the reads; of two segments of a prefix the first is always above the second."""
    return segment.reads - segment.depth * 1e-7


def _heat_order(segment: SegmentHeat) -> tuple[float, int, bytes]:
    # Of equal counts the parent comes first; the name makes equal tables give equal answers.
    return -segment.reads, segment.depth, segment.name
