"""Which copies leave the pool when a worker needs room: the least recently read ones, leaves first.

Source: TokenLake 4.4 (global LRU over copies). Leaf first is ours: a segment whose prefix is gone
cannot be read. Both agree, because whoever reads a segment reads its prefix too: what depends on
the oldest segment of a worker is at least as old, on whichever worker it lies.
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
    """Copies to drop, in this order, until `holder` has room for `count` segments more.

    A copy goes alone if others hold the segment too; the last one takes along what needs it as a
    prefix, on all workers.

    Args:
        pinned: segments that a plan in progress reads or writes; they and their prefixes stay.

    Returns:
        Fewer than `count` copies of `holder` when the rest is pinned; a little more of them when
        the last segment chosen has many children.
    """
    held = [segment for segment in tree if holder in segment.copies]
    # Of segments read at the same moment the deepest goes first, so that no more than needed goes.
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
    """A segment and all that depends on it, children before parents."""
    order = [top]
    for segment in order:
        order.extend(segment.children.values())
    return reversed(order)
