"""Which bytes of blocks have been written, where writers fill them part by part.

Tests: tests/unit/kv/test_block_parts.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Part(NamedTuple):
    """`size` bytes of a block from `offset` on."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.size

    def overlaps(self, other: Part) -> bool:
        """Whether both have some byte."""
        return self.offset < other.end and other.offset < self.end


class PartialBlocks:
    """Blocks, by index, of which some bytes are written and some are not."""

    def __init__(self) -> None:
        # Disjoint parts that do not touch, in order.
        self._written: dict[int, list[Part]] = {}

    def __len__(self) -> int:
        return len(self._written)

    def add(self, index: int, part: Part, block_bytes: int) -> bool:
        """A part was written; True when with it the block is whole, and forgotten here."""
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
        """A part is about to be overwritten: what it held counts no more."""
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
        """Nothing of these blocks is written any more, or all of it."""
        for index in indexes:
            self._written.pop(index, None)
