"""Decides for the whole fleet which cached copies are evicted first: redundant unread ones.

A worker alone evicts its least recently used blocks, and does not know the copies of other workers.
Here every full worker reports its next evictions. A copy is evicted before all others if another
worker of the same kind keeps one and no worker in the fleet reads the block. So the last copy of a
prefix, and every copy of a prefix that is read, outlive the second copy of a cold one, on any
worker.

Source: TokenLake 4.4 (global LRU over copies). Tests: tests/unit/policy/test_global_lru.py.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence

from kvmesh.core.pool import OldBlocks, PoolMember
from kvmesh.core.types import BlockHash, WorkerId

MAX_OLDEST = 256
"""Maximum number of blocks that each tier of a worker is asked for: 4 KiB of names."""


class PoolEviction(enum.Enum):
    """The scope of the data by which a worker's evictions are chosen."""

    LOCAL = "local"
    """The worker, by its own reads."""
    GLOBAL = "global"
    """The reads and the copies of the whole fleet come first."""


def plan_evictions(
    members: Sequence[PoolMember],
    held: Mapping[WorkerId, Collection[BlockHash]],
    warm: Collection[BlockHash],
) -> dict[WorkerId, list[OldBlocks]]:
    """Returns the copies that each worker gives up, by tier; the last copy of a block stays.

    Args:
        members: workers that do the same work. Those with the least room give up theirs first;
            copies on leaving workers do not count.
        held: of the blocks that are evicted next, those that each worker holds, in any tier.
        warm: blocks that some worker in the fleet reads.
    """
    staying = [member for member in members if not member.report.leaving]
    keeps = {member.worker_id: set(held.get(member.worker_id, ())) for member in staying}
    plan: dict[WorkerId, list[OldBlocks]] = {}
    for member in sorted(staying, key=lambda each: (each.report.room_blocks, each.worker_id)):
        worker = member.worker_id
        elsewhere = {key for other, keys in keeps.items() if other != worker for key in keys}
        elsewhere.difference_update(warm)
        for old in member.oldest:
            gone = tuple(key for key in old.hashes if key in elsewhere)
            if gone:
                plan.setdefault(worker, []).append(OldBlocks(old.tier, gone))
                keeps[worker].difference_update(gone)
    return plan
