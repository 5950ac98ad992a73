"""What leaves a pool and the tiers below it next."""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.core.pool import OldBlocks
from kvmesh.core.types import BlockHash
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.oldest import evict_first, oldest_blocks
from kvmesh.kv.tiers import Tier, Tiers


def keys(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(number.to_bytes(16, "big")) for number in numbers)


def cache(pool: BlockPool, numbers: Sequence[int]) -> None:
    """A sequence with these blocks has ended."""
    blocks = pool.allocate(len(numbers))
    for block, key in zip(blocks, keys(*numbers), strict=True):
        pool.seal(block, key)
    pool.release(blocks)


def tiered(num_places: int) -> tuple[BlockPool, Tiers]:
    pool = BlockPool(8, 16)
    tiers = Tiers([Tier("host", num_places)], pool.lost_below)
    pool.below = tiers
    return pool, tiers


def copy_down(tiers: Tiers, *numbers: int) -> None:
    for copy in tiers.begin_write(0, keys(*numbers)):
        tiers.end_write(0, copy, is_good=True)


def test_only_full_tiers_are_told_of() -> None:
    pool, tiers = tiered(16)
    cache(pool, (1, 2, 3, 4))
    copy_down(tiers, 1, 2, 3, 4)
    assert oldest_blocks(pool, 9) == ()
    cache(pool, (5, 6, 7, 8))
    assert oldest_blocks(pool, 5) == (OldBlocks("pool", keys(4, 3, 2, 1, 8)),)


def test_a_tier_that_is_full_names_its_oldest_copies() -> None:
    pool, tiers = tiered(4)
    cache(pool, (1, 2, 3, 4))
    copy_down(tiers, 4, 3, 2, 1)
    assert oldest_blocks(pool, 2) == (OldBlocks("host", keys(4, 3)),)


def test_what_is_to_leave_first_leaves_pool_and_tier_first() -> None:
    pool, tiers = tiered(4)
    cache(pool, (1, 2, 3, 4))
    copy_down(tiers, 4, 3, 2, 1)
    cache(pool, (5, 6, 7, 8))
    evict_first(pool, keys(2, 1))
    assert oldest_blocks(pool, 3) == (
        OldBlocks("pool", keys(1, 2, 4)),
        OldBlocks("host", keys(1, 2, 4)),
    )
    copy_down(tiers, 5)
    assert keys(1)[0] not in tiers
    pool.clear_cached(1)
    assert pool.find(keys(1)[0]) is None
    pool.check_integrity()
    tiers.check_integrity()


def test_a_copy_that_is_to_leave_goes_no_further_down() -> None:
    pool = BlockPool(8, 16)
    tiers = Tiers([Tier("host", 4), Tier("disk", 4)], pool.lost_below)
    pool.below = tiers
    cache(pool, (1, 2))
    copy_down(tiers, 1, 2)
    evict_first(pool, keys(1))
    assert tiers[0].unsaved(9) == list(keys(2))
