"""Which copies leave the pool when a worker needs room: the least recently read ones, leaves first.

Source: TokenLake 4.4 (global LRU over copies). Leaf first is ours: a segment whose prefix is gone
cannot be read. Tests: tests/unit/policy/test_segment_tree.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.policy.segment_tree import Segment, SegmentTree


def plan_eviction(
    tree: SegmentTree,
    holder: WorkerId,
    count: int,
    pinned: Collection[BlockHash] = frozenset(),
) -> list[BlockHash]:
    """Copies on one worker to drop, in this order.

    A copy may go when others hold the segment too, or when nothing in the pool needs it as a
    prefix any more.

    Args:
        pinned: segments that a plan in progress reads; never dropped.

    Returns:
        At most `count` names; fewer when the rest is pinned or needed as a prefix.
    """
    held = [s for s in tree if holder in s.copies and s.name not in pinned]
    gone: set[BlockHash] = set()

    def may_go(segment: Segment) -> bool:
        return len(segment.copies) > 1 or all(child in gone for child in segment.children)

    heap = [(s.copies[holder], s.name, s) for s in held if may_go(s)]
    heapq.heapify(heap)
    chosen: list[BlockHash] = []
    while heap and len(chosen) < count:
        _, name, segment = heapq.heappop(heap)
        chosen.append(name)
        parent = segment.parent
        if len(segment.copies) > 1:
            continue  # other copies stay, so its parent is still needed
        gone.add(name)
        is_due = parent is not None and holder in parent.copies and parent.name not in pinned
        if parent is not None and is_due and len(parent.copies) == 1 and may_go(parent):
            heapq.heappush(heap, (parent.copies[holder], parent.name, parent))
    return chosen
