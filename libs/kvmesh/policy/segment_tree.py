"""The prefix tree of segments in the pool: the holders of each copy, its reads, and its last read.

It is the bookkeeping for the pool's decisions (`heavy_hitters`, `replication`, `pool_eviction`). A
segment is read only with its prefix, so a parent's count is never below a child's.
Source: TokenLake 3 (`get_prefix_tree`), 4.3. Tests: tests/unit/policy/test_segment_tree.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvmesh.core.types import BlockHash, WorkerId


@dataclass(eq=False, slots=True)
class Segment:
    """A node of the tree.

    Attributes:
        parent: the segment before it; None for the first segment of a prefix.
        accesses: number of reads, faded by `SegmentTree.fade`.
        depth: number of segments before it in its prefix.
        copies: its holders, with the time at which each copy was last read.
    """

    name: BlockHash
    parent: Segment | None
    accesses: float = 0.0
    depth: int = 0
    children: dict[BlockHash, Segment] = field(default_factory=dict)
    copies: dict[WorkerId, float] = field(default_factory=dict)


class SegmentTree:
    """Segments with at least one copy, by name."""

    def __init__(self) -> None:
        self._segments: dict[BlockHash, Segment] = {}
        self.roots: dict[BlockHash, Segment] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())

    def get(self, name: BlockHash) -> Segment | None:
        """Returns the segment; None if no copy of it exists."""
        return self._segments.get(name)

    def match(self, names: Sequence[BlockHash]) -> list[Segment]:
        """Returns the longest prefix of `names` that the pool holds."""
        found: list[Segment] = []
        for name in names:
            segment = self._segments.get(name)
            if segment is None:
                break
            found.append(segment)
        return found

    def add(self, name: BlockHash, parent: Segment | None, holder: WorkerId, now: float) -> Segment:
        """Adds a copy and returns its segment; the parent must be in the tree already."""
        segment = self._segments.get(name)
        if segment is None:
            assert parent is None or self._segments.get(parent.name) is parent, "an orphan"
            depth = 0 if parent is None else parent.depth + 1
            segment = self._segments[name] = Segment(name, parent, depth=depth)
            siblings = self.roots if parent is None else parent.children
            siblings[name] = segment
        segment.copies[holder] = now
        return segment

    def read(self, segment: Segment, holder: WorkerId, now: float, weight: float = 1.0) -> None:
        """Counts a read of one copy."""
        segment.accesses += weight
        segment.copies[holder] = now

    def drop(self, segment: Segment, holder: WorkerId) -> None:
        """Removes a copy. With its last copy the segment goes too; it must then be a leaf."""
        del segment.copies[holder]
        if not segment.copies:
            assert not segment.children, "children of a segment that is gone cannot be read"
            siblings = self.roots if segment.parent is None else segment.parent.children
            del siblings[segment.name]
            del self._segments[segment.name]

    def fade(self, factor: float) -> None:
        """Multiplies all counts, so that old reads weigh less than new ones."""
        for segment in self._segments.values():
            segment.accesses *= factor
