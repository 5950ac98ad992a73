"""Copies of hot segments: when to make one, where, and which copy to read.

Source: TokenLake 4.3. Tests: tests/unit/policy/test_replication.py.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.policy.segment_tree import Segment


class CopyReason(enum.Enum):
    """Why a segment is copied."""

    OVERLOADED_HOLDER = "a heavy hitter lies on an overloaded worker"
    LEAVING_HOLDER = "all who hold a heavy hitter are about to leave"
    HASHED_HOME = "the worker that a prefix's hash names does not hold it yet"
    OTHER_CLUSTER = "nobody in a cluster holds a heavy hitter of another one"


@dataclass(frozen=True, slots=True)
class Copy:
    """A segment to copy from one worker to another."""

    segment: BlockHash
    source: WorkerId
    target: WorkerId
    reason: CopyReason


def _anywhere(_segment: Segment, _worker: WorkerId) -> bool:
    return True


def plan_copies(
    hitters: Sequence[Segment],
    loads: Mapping[WorkerId, float],
    overload: float = 1.15,
    max_copies: int = 64,
    fits: Callable[[Segment, WorkerId], bool] = _anywhere,
) -> list[Copy]:
    """Copies heavy hitters of overloaded workers to the least loaded ones without a copy (4.3).

    Each planned copy is counted as if reads already spread over all copies, so that one call does
    not send everything to one worker.

    Args:
        hitters: most read first.
        loads: recent reads of every live worker, in the unit of the segments' counts.
        overload: factor over the mean load above which a worker is overloaded.
        max_copies: maximum number of copies per call; bounds the traffic.
        fits: says whether a worker has room for a segment.
    """
    if not loads:
        return []
    expected = dict(loads)
    limit = overload * sum(loads.values()) / len(loads)
    copies: list[Copy] = []
    for segment in hitters:
        holders = [holder for holder in segment.copies if holder in expected]
        if not holders or len(copies) >= max_copies:
            continue
        source = max(holders, key=lambda holder: (expected[holder], holder))
        if expected[source] <= limit:
            continue
        free = [
            worker for worker in expected if worker not in segment.copies and fits(segment, worker)
        ]
        if not free:
            continue
        target = min(free, key=lambda worker: (expected[worker], worker))
        gap = expected[source] - expected[target]
        # Readers take the less loaded of two copies, so the new copy gets at most enough reads to
        # even both out.
        moved = min(_spread(segment, holders, expected), gap / 2)
        if gap <= 0:
            continue
        expected[target] += moved
        for holder in holders:
            expected[holder] -= moved / len(holders)
        copies.append(Copy(segment.name, source, target, CopyReason.OVERLOADED_HOLDER))
    return copies


def _spread(
    segment: Segment, holders: Sequence[WorkerId], expected: Mapping[WorkerId, float]
) -> float:
    """Returns the reads that a new copy takes over from the old ones."""
    share = segment.accesses / (len(holders) + 1)
    # Counts and loads fade separately; a holder cannot give away more reads than it has.
    return min(share, sum(expected[holder] for holder in holders) / len(holders))


def choose_copy(
    segment: Segment, loads: Mapping[WorkerId, float], rng: random.Random
) -> WorkerId | None:
    """Returns the holder to read from: the less loaded of two random ones (4.3).

    Args:
        loads: load of every live worker; copies elsewhere are not read.

    Returns:
        The worker; None if no live worker holds a copy.
    """
    holders = [holder for holder in segment.copies if holder in loads]
    if len(holders) > 2:
        holders = rng.sample(holders, 2)
    return min(holders, key=lambda holder: loads[holder], default=None)
