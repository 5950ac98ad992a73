"""Tracks the written bytes of blocks that several writers fill part by part.

Tests: tests/unit/kv/test_block_parts.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Part(NamedTuple):
    """`size` bytes of a block, starting at `offset`."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.size

    def overlaps(self, other: Part) -> bool:
        """Returns whether both parts have a common byte."""
        return self.offset < other.end and other.offset < self.end


class PartialBlocks:
    """Blocks, by index, that are written in part."""

    def __init__(self) -> None:
        # Disjoint parts that do not touch, in order of offset.
        self._written: dict[int, list[Part]] = {}

    def __len__(self) -> int:
        return len(self._written)

    def add(self, index: int, part: Part, block_bytes: int) -> bool:
        """Records a written part; returns True (and forgets the block) if the block is complete."""
        start, end = part.offset, part.end
        apart: list[Part] = []
        for other in self._written.pop(index, []):
            if other.end < start or end < other.offset:
                apart.append(other)
            else:
                start, end = min(start, other.offset), max(end, other.end)
        if (start, end) == (0, block_bytes):
            return True
        self._written[index] = sorted([*apart, Part(start, end - start)])
        return False

    def begin(self, index: int, part: Part, *, was_whole: bool, block_bytes: int) -> None:
        """Records that a part is about to be overwritten: its bytes no longer count as written."""
        before = [Part(0, block_bytes)] if was_whole else self._written.pop(index, [])
        left: list[Part] = []
        for other in before:
            before_it = Part(other.offset, min(other.end, part.offset) - other.offset)
            start = max(other.offset, part.end)
            behind_it = Part(start, other.end - start)
            left += [piece for piece in (before_it, behind_it) if piece.size > 0]
        if left:
            self._written[index] = left

    def forget(self, indexes: Iterable[int]) -> None:
        """Drops the records of these blocks, which are now wholly written or wholly unwritten."""
        for index in indexes:
            self._written.pop(index, None)
