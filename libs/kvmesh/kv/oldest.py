"""The blocks that a worker evicts next, from its pool and its tiers, and changes of that order.

The live worker and the simulated one use it alike.
Tests: tests/unit/kv/test_oldest.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.core.pool import OldBlocks
from kvmesh.core.types import BlockHash
from kvmesh.kv.block_news import is_announced
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.tiers import is_nearly_full

POOL = "pool"
"""Name of the pool itself among the tiers."""


def oldest_blocks(pool: BlockPool, limit: int) -> tuple[OldBlocks, ...]:
    """Returns the blocks that leave each nearly full tier next, at most `limit` of each.

    Blocks that other workers are not told of are left out.
    """
    found: list[OldBlocks] = []
    if is_nearly_full(pool.num_empty, pool.num_blocks):
        found.append(OldBlocks(POOL, tuple(pool.oldest(limit))))
    if pool.below is not None:
        found.extend(pool.below.oldest(limit))
    told = (OldBlocks(old.tier, tuple(filter(is_announced, old.hashes))) for old in found)
    return tuple(old for old in told if old.hashes)


def evict_first(pool: BlockPool, hashes: Sequence[BlockHash]) -> None:
    """Makes these blocks the next ones to leave the pool and its tiers, the last one first."""
    pool.evict_first(hashes)
    if pool.below is not None:
        pool.below.evict_first(hashes)
