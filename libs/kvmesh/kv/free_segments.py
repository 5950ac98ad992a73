"""The free blocks of a pool as maximal contiguous segments.

Owns the positions of free blocks; `block_pool.py` knows why a block is free. A transfer sends one
run per call, so few segments per request means few calls (FlowKV, contiguous allocation).
Tests: tests/unit/kv/test_free_segments.py, tests/property/test_block_pool_machine.py.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable

from kvmesh.kv.bit_tree import BitTree

_STALE_SLACK = 16
"""Number of stale entries beyond the live ones that a heap may hold before it is rebuilt."""


class _Heap:
    """First blocks of the segments of one length, the lowest first.

    `remove` and merges take segments out of the middle of the heap, so entries may be stale. They
    are dropped at the top, or all at once when most entries are stale: constant cost per entry.
    """

    __slots__ = ("num_live", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.num_live = 0


class FreeSegments:
    """Disjoint segments of block ids, never two of them adjacent.

    Each operation costs O(log s) per segment touched, where s is the number of segments.
    """

    def __init__(self) -> None:
        self._length_at: dict[int, int] = {}  # first block -> length
        self._start_before: dict[int, int] = {}  # one past the last block -> first block
        self._heaps: dict[int, _Heap] = {}  # length -> first blocks
        # Keys of _heaps, sorted. A list: s blocks have at most sqrt(2 s) different lengths.
        self._lengths: list[int] = []
        self._starts: BitTree | None = None  # keys of _length_at, once `remove` needed them
        self._num_blocks = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks in all segments."""
        return self._num_blocks

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return len(self._length_at)

    @property
    def largest(self) -> int:
        """Length of the longest segment; 0 when there is none."""
        return self._lengths[-1] if self._lengths else 0

    def segments(self) -> list[tuple[int, int]]:
        """Returns (first block, length) of every segment, ordered by first block."""
        return sorted(self._length_at.items())

    def add(self, blocks: Iterable[int]) -> None:
        """Adds distinct blocks and merges them with their neighbours."""
        if isinstance(blocks, range) and blocks.step == 1:
            if blocks:
                self._insert(blocks.start, blocks.stop)
            return
        ordered = sorted(blocks)
        if not ordered:
            return
        start = end = ordered[0]
        for block in ordered:
            if block != end:
                self._insert(start, end)
                start = block
            end = block + 1
        self._insert(start, end)

    def take(self, n: int, after: int | None = None) -> list[int]:
        """Takes `n` blocks out in as few segments as possible.

        Takes them right after block `after` if all of them fit there, else from the tightest
        segment that fits. If none fits, takes the blocks right after `after`, then the largest
        segments; the last segment is again chosen by fit.
        """
        assert 0 <= n <= self._num_blocks, f"{n} of {self._num_blocks} blocks"
        taken: list[int] = []
        next_to = self._length_at.get(after + 1, 0) if after is not None else 0
        if after is not None and next_to and (next_to >= n or self.find(n) is None):
            taken += self._cut(after + 1, n)
        while len(taken) < n:
            missing = n - len(taken)
            found = self.find(missing)
            start = self._lowest(self.largest) if found is None else found.start
            taken += self._cut(start, missing)
        return taken

    def find(self, n: int) -> range | None:
        """Returns the tightest segment of at least `n` blocks; None if none is so long."""
        lengths = self._lengths
        index = bisect_left(lengths, n)
        if index == len(lengths):
            return None
        length = lengths[index]
        start = self._lowest(length)
        return range(start, start + length)

    def remove(self, first: int, count: int) -> None:
        """Removes exactly these blocks, which lie in one segment."""
        start = first if first in self._length_at else self._segment_before(first)
        assert start is not None, f"block {first} is not free"
        end = start + self._length_at[start]
        assert first + count <= end, f"blocks {first}+{count} are not free"
        self._drop(start)
        self._put(start, first)
        self._put(first + count, end)

    def _segment_before(self, block: int) -> int | None:
        if self._starts is None:
            self._starts = BitTree()
            for start in self._length_at:
                self._starts.add(start)
        return self._starts.at_or_before(block)

    def _cut(self, start: int, limit: int) -> range:
        """Takes up to `limit` blocks from the front of the segment at `start`."""
        length = self._drop(start)
        if length <= limit:
            return range(start, start + length)
        self._put(start + limit, start + length)
        return range(start, start + limit)

    def _insert(self, start: int, end: int) -> None:
        before = self._start_before.get(start)
        if before is not None:
            self._drop(before)
            start = before
        if end in self._length_at:
            end += self._drop(end)
        self._put(start, end)

    def _put(self, start: int, end: int) -> None:
        """Records a segment that touches no other one; ignores an empty one."""
        if start == end:
            return
        length = end - start
        self._length_at[start] = length
        self._start_before[end] = start
        if self._starts is not None:
            self._starts.add(start)
        heap = self._heaps.get(length)
        if heap is None:
            heap = self._heaps[length] = _Heap()
            insort(self._lengths, length)
        heapq.heappush(heap.starts, start)
        heap.num_live += 1
        self._num_blocks += length

    def _drop(self, start: int) -> int:
        """Forgets the segment at `start`; returns its length."""
        length = self._length_at.pop(start)
        del self._start_before[start + length]
        if self._starts is not None:
            self._starts.remove(start)
        self._num_blocks -= length
        heap = self._heaps[length]
        heap.num_live -= 1
        if heap.num_live == 0:
            del self._heaps[length]
            del self._lengths[bisect_left(self._lengths, length)]
        elif len(heap.starts) > 2 * heap.num_live + _STALE_SLACK:
            heap.starts = [s for s in set(heap.starts) if self._length_at.get(s) == length]
            heapq.heapify(heap.starts)
        return length

    def _lowest(self, length: int) -> int:
        """Returns the first block of the lowest segment of this length."""
        starts = self._heaps[length].starts
        while self._length_at.get(starts[0]) != length:
            heapq.heappop(starts)
        return starts[0]

    def check_integrity(self) -> None:
        """Raises AssertionError unless all views agree and segments are maximal."""
        segments = self.segments()
        assert self._start_before == {start + length: start for start, length in segments}
        assert self._num_blocks == sum(length for _, length in segments)
        assert self._lengths == sorted(self._heaps) == sorted({length for _, length in segments})
        for length, heap in self._heaps.items():
            here = {start for start, other in segments if other == length}
            assert heap.num_live == len(here), f"{heap.num_live} segments of {length}"
            assert here <= set(heap.starts), f"a segment of {length} cannot be found"
            assert len(heap.starts) <= 2 * heap.num_live + _STALE_SLACK, "too many are stale"
        assert self.largest == max((length for _, length in segments), default=0)
        previous_end = -1
        for start, length in segments:
            assert length > 0, f"empty segment at {start}"
            assert start > previous_end, f"segment at {start} overlaps or touches the one before"
            assert self._starts is None or start in self._starts, f"{start} cannot be found"
            previous_end = start + length
