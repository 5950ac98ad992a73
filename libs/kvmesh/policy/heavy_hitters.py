"""Finds the most read segments of the pool without a walk over all of it.

Source: TokenLake 4.3. Tests: tests/unit/policy/test_segment_tree.py.
"""

from __future__ import annotations

import heapq
import math

from kvmesh.policy.segment_tree import Segment, SegmentTree


def num_heavy_hitters(num_workers: int) -> int:
    """Returns N log2 N copies, which bound the imbalance of N workers with high probability."""
    return max(math.ceil(num_workers * math.log2(max(num_workers, 2))), 1)


def heavy_hitters(tree: SegmentTree, count: int) -> list[Segment]:
    """Returns the `count` most read segments, most read first (the search from the roots of 4.3).

    A child is never read more than its parent. So a search from the roots that always opens the
    most read segment finds the segments in order and visits only their children.
    """
    found: list[Segment] = []
    # The name breaks ties, so that equal trees give equal answers.
    heap = [(-root.accesses, root.name, root) for root in tree.roots.values()]
    heapq.heapify(heap)
    while heap and len(found) < count:
        segment = heapq.heappop(heap)[2]
        found.append(segment)
        for child in segment.children.values():
            heapq.heappush(heap, (-child.accesses, child.name, child))
    return found
