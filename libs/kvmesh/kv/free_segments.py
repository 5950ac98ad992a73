"""The empty blocks of a pool as maximal contiguous segments.

Owns where the holes are, not why a block is empty (that is `block_pool.py`). A transfer sends one
run per call, so few segments per request means few calls (FlowKV, contiguous allocation).
Tests: tests/unit/kv/test_free_segments.py, tests/property/test_block_pool_machine.py.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


class FreeSegments:
    """Disjoint segments of block ids, never two of them adjacent.

    Each operation costs O(log s) comparisons per segment touched, s being the number of segments,
    and one move inside a list of s small entries.
    """

    def __init__(self) -> None:
        self._length_at: dict[int, int] = {}  # first block -> length
        self._start_before: dict[int, int] = {}  # one past the last block -> first block
        self._by_length: list[tuple[int, int]] = []  # (length, first block), sorted
        self._num_blocks = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in all segments."""
        return self._num_blocks

    @property
    def num_segments(self) -> int:
        """How many segments there are."""
        return len(self._by_length)

    @property
    def largest(self) -> int:
        """Length of the longest segment; 0 when there is none."""
        return self._by_length[-1][0] if self._by_length else 0

    def segments(self) -> list[tuple[int, int]]:
        """(first block, length) of every segment, by first block."""
        return sorted(self._length_at.items())

    def add(self, blocks: Iterable[int]) -> None:
        """Puts distinct blocks in, merging them with their neighbours."""
        start = end = -1
        for block in sorted(blocks):
            if block != end:
                self._insert(start, end)
                start = block
            end = block + 1
        self._insert(start, end)

    def take(self, n: int, after: int | None = None) -> list[int]:
        """Takes `n` blocks out in as few segments as possible.

        First what lies right after block `after`; the rest from the tightest segment that fits, or
        if none fits from the largest ones, the last of them again chosen by fit.
        """
        assert 0 <= n <= self._num_blocks, f"{n} of {self._num_blocks} blocks"
        taken: list[int] = []
        if after is not None and after + 1 in self._length_at:
            taken += self._cut(after + 1, n)
        while len(taken) < n:
            missing = n - len(taken)
            tightest = bisect_left(self._by_length, (missing, -1))
            _, start = self._by_length[min(tightest, len(self._by_length) - 1)]
            taken += self._cut(start, missing)
        return taken

    def _cut(self, start: int, limit: int) -> range:
        """Takes up to `limit` blocks from the front of the segment at `start`."""
        length = self._remove(start)
        count = min(length, limit)
        self._insert(start + count, start + length)
        return range(start, start + count)

    def _insert(self, start: int, end: int) -> None:
        if start == end:
            return
        if start in self._start_before:
            start = self._start_before[start]
            self._remove(start)
        if end in self._length_at:
            end += self._remove(end)
        self._length_at[start] = end - start
        self._start_before[end] = start
        insort(self._by_length, (end - start, start))
        self._num_blocks += end - start

    def _remove(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._start_before[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        self._num_blocks -= length
        return length

    def check_integrity(self) -> None:
        """Raises AssertionError unless the three views agree and segments are maximal."""
        segments = self.segments()
        assert self._by_length == sorted((length, start) for start, length in segments)
        assert self._start_before == {start + length: start for start, length in segments}
        assert self._num_blocks == sum(length for _, length in segments)
        previous_end = -1
        for start, length in segments:
            assert length > 0, f"empty segment at {start}"
            assert start > previous_end, f"segment at {start} overlaps or touches the one before"
            previous_end = start + length
