"""Chooses the copies to evict when a worker needs room: least recently read first, leaves first.

Source: TokenLake 4.4 (global LRU over copies). Evicting leaves first is ours: a segment whose
prefix is gone cannot be read. Both orders agree. A read of a segment reads its prefix too, so all
segments that depend on a worker's oldest one are at least as old, on any worker.
Tests: tests/unit/policy/test_segment_tree.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.policy.segment_tree import Segment, SegmentTree


class Drop(NamedTuple):
    """A copy to drop."""

    segment: BlockHash
    holder: WorkerId


def plan_eviction(
    tree: SegmentTree,
    holder: WorkerId,
    count: int,
    pinned: Collection[BlockHash] = frozenset(),
) -> list[Drop]:
    """Plans which copies to drop so that `holder` has room for `count` more segments.

    A copy is dropped alone if other workers hold the segment too. With the last copy all segments
    that follow it are dropped, on all workers.

    Args:
        pinned: segments that a running plan reads or writes; they and their prefixes stay.

    Returns:
        The copies in the order of dropping. They include fewer than `count` of `holder` if the rest
        is pinned, and a few more if the last chosen segment has many children.
    """
    held = [segment for segment in tree if holder in segment.copies]
    # Among segments read at the same time the deepest goes first, so that no extra copies go.
    held.sort(key=lambda segment: (segment.copies[holder], -segment.depth, segment.name))
    drops: dict[Drop, None] = {}
    freed = 0
    for segment in held:
        if freed >= count:
            break
        if Drop(segment.name, holder) in drops or segment.name in pinned:
            continue
        if any(
            Drop(segment.name, other) not in drops for other in segment.copies if other != holder
        ):
            drops[Drop(segment.name, holder)] = None
            freed += 1
            continue
        subtree = list(_leaves_first(segment))
        if any(each.name in pinned for each in subtree):
            continue
        for each in subtree:
            for other in each.copies:
                drop = Drop(each.name, other)
                freed += drop not in drops and other == holder
                drops.setdefault(drop)
    return list(drops)


def _leaves_first(top: Segment) -> Iterator[Segment]:
    """Returns a segment and all that follow it, children before parents."""
    order = [top]
    for segment in order:
        order.extend(segment.children.values())
    return reversed(order)
