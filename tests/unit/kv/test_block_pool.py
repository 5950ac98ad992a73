from collections.abc import Callable

import pytest

from kvmesh.core.errors import OutOfBlocksError
from kvmesh.core.types import BlockHash
from kvmesh.kv.block_pool import BlockPool


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def cached(pool: BlockPool, *numbers: int) -> list[int]:
    """A sequence's blocks with these hashes, released."""
    blocks = pool.allocate(len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        assert pool.seal(block, name(number))
    pool.release(blocks)
    return blocks


def test_allocation_is_contiguous_and_extends() -> None:
    pool = BlockPool(16, 4)
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    assert pool.allocate(2, after=first[-1]) == [3, 4]
    pool.release(first)
    assert pool.allocate(2, after=4) == [5, 6], "not the tighter hole at 0"
    assert pool.allocate(4) == [7, 8, 9, 10]
    pool.check_integrity()


def test_failed_allocation_changes_nothing() -> None:
    pool = BlockPool(4, 4)
    cached(pool, 1, 2)
    pool.allocate(1)
    pool.take_events()
    before = pool.statistics()
    with pytest.raises(OutOfBlocksError):
        pool.allocate(4)
    assert pool.statistics() == before
    assert pool.take_events().removed == []


def test_match_is_the_longest_prefix_and_takes_nothing() -> None:
    pool = BlockPool(8, 4)
    blocks = cached(pool, 1, 2, 3)
    assert pool.match([name(1), name(2), name(9), name(3)]) == blocks[:2]
    assert pool.match([name(9), name(1)]) == []
    assert pool.is_idle


def test_acquired_blocks_are_not_evicted() -> None:
    pool = BlockPool(4, 4)
    blocks = cached(pool, 1, 2)
    pool.acquire(blocks)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(3)
    pool.release(blocks)
    pool.allocate(3)
    assert pool.match([name(1), name(2)]) == blocks[:1]


def test_eviction_takes_the_oldest_sequence_leaf_first() -> None:
    pool = BlockPool(4, 4)
    cached(pool, 1, 2)
    cached(pool, 3, 4)
    pool.take_events()
    evicted = []
    for _ in range(4):
        pool.allocate(1)
        evicted += pool.take_events().removed
    assert evicted == [name(2), name(1), name(4), name(3)]


def test_reuse_makes_blocks_young_again() -> None:
    pool = BlockPool(4, 4)
    old = cached(pool, 1, 2)
    cached(pool, 3, 4)
    pool.acquire(old)
    pool.release(old)
    pool.allocate(2)
    assert pool.held_hashes() == [name(1), name(2)]


def test_first_block_with_a_hash_wins() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2)
    assert pool.seal(first, name(1))
    assert pool.seal(first, name(1)), "sealing again is harmless"
    assert not pool.seal(second, name(1))
    pool.release([second])
    assert pool.statistics().num_empty == 3, "the duplicate is not kept"
    assert pool.match([name(1)]) == [first]
    assert pool.take_events().stored == [name(1)]


def test_shared_block_is_released_by_its_last_holder() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1)
    pool.acquire([block])
    pool.release([block])
    assert not pool.is_idle
    pool.release([block])
    assert pool.is_idle


def test_events_are_net_and_in_order() -> None:
    pool = BlockPool(4, 4)
    cached(pool, 1, 2)
    assert pool.take_events().stored == [name(1), name(2)]
    assert pool.clear_cached() == 2
    cached(pool, 3)
    cached(pool, 2)  # removed and stored again
    pool.clear_cached()
    cached(pool, 4, 5)  # 3 was stored and removed
    events = pool.take_events()
    assert events.stored == [name(4), name(5)]
    assert sorted(events.removed) == [name(1), name(2)]
    assert pool.take_events() == type(events)([], [])
    pool.check_integrity()


def test_statistics() -> None:
    pool = BlockPool(8, 4)
    cached(pool, 1, 2)
    pool.allocate(3)
    statistics = pool.statistics()
    assert (statistics.num_empty, statistics.num_evictable, statistics.num_referenced) == (3, 2, 3)
    assert (statistics.num_hashed, statistics.num_free_segments) == (2, 1)
    assert (statistics.largest_free_segment, statistics.allocated_total) == (3, 5)
    assert pool.num_free == 5


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.release([0]),
        lambda pool: pool.acquire([0]),
        lambda pool: pool.seal(0, name(1)),
    ],
    ids=["release", "acquire", "seal"],
)
def test_using_an_empty_block_is_a_bug(misuse: Callable[[BlockPool], object]) -> None:
    with pytest.raises(AssertionError, match="block 0"):
        misuse(BlockPool(4, 4))


def test_integrity_check_notices_a_leak() -> None:
    pool = BlockPool(4, 4)
    (block,) = pool.allocate(1)
    pool._references[block] = 0
    with pytest.raises(AssertionError, match=f"block {block}"):
        pool.check_integrity()


def test_cached_blocks_give_way_to_keep_a_request_in_one_run() -> None:
    pool = BlockPool(32, 16)
    held = [pool.allocate(4) for _ in range(8)]
    for number, blocks in enumerate(held):
        for index, block in enumerate(blocks):
            pool.seal(block, BlockHash(bytes([number, index]) * 8))
    for number in (0, 2, 1, 3, 4, 5, 6, 7):
        pool.release(held[number])

    blocks = pool.allocate(8)

    # The two oldest, 0-3 and 8-11, are enough but lie apart; the next one lies between them.
    assert blocks == list(range(8))
    assert pool.statistics().evicted_total > 8
    pool.check_integrity()


def test_no_more_than_an_eighth_of_the_pool_is_emptied_for_nothing() -> None:
    pool = BlockPool(64, 16)
    held = [pool.allocate(1) for _ in range(64)]
    for number, (block,) in enumerate(held):
        pool.seal(block, BlockHash(bytes([number]) * 16))
    for start in range(4):  # neighbours are far apart in age
        for blocks in held[start::4]:
            pool.release(blocks)

    taken = pool.allocate(8)

    statistics = pool.statistics()
    assert len(taken) == 8
    assert statistics.num_empty <= 64 // 8
    assert statistics.num_evictable == 64 - 8 - statistics.num_empty


def test_a_run_between_blocks_in_use_is_made_of_what_is_cached_there() -> None:
    pool = BlockPool(64, 16)
    old = pool.allocate(40)
    first, cached, second = pool.allocate(6), pool.allocate(2), pool.allocate(16)
    for number, block in enumerate([*cached, *old]):
        pool.seal(block, name(number))
    pool.release(first)
    for block in old[::2]:  # older, and far from each other: they go first and help nobody
        pool.release([block])
    pool.release(cached)

    assert pool.allocate(8) == [*first, *cached]

    assert pool.match([name(0)]) == []
    assert pool.statistics().num_evictable == 10
    pool.release(second)
    pool.check_integrity()


def test_a_fresh_pool_gives_every_request_one_run() -> None:
    pool = BlockPool(256, 16)
    for n in (1, 7, 31, 64, 100):
        blocks = pool.allocate(n)
        assert blocks == list(range(blocks[0], blocks[0] + n))


def test_room_is_what_is_empty_or_was_released_before_a_turn() -> None:
    pool = BlockPool(8, 4)
    cached(pool, 1, 2)
    turn = pool.turn
    cached(pool, 3)
    assert pool.num_room(turn, 100) == 5 + 2
    assert pool.num_room(pool.turn, 100) == 8
    assert pool.num_room(0, 100) == 5
    assert pool.num_room(pool.turn, 6) == 6
    pool.acquire(pool.match([name(1)]))
    assert pool.num_room(turn, 100) == 5 + 1


def test_what_is_to_leave_first_does_and_its_end_before_the_rest() -> None:
    pool = BlockPool(6, 4)
    cached(pool, 1)
    cached(pool, 2, 3, 4)
    used = pool.match([name(2)])
    pool.acquire(used)
    assert pool.evict_first([name(2), name(3), name(4), name(9)]) == 2
    assert pool.num_room(0, 100) == 2 + 2, "what leaves first makes room at once"
    pool.take_events()
    pool.allocate(3)
    assert pool.take_events().removed == [name(4)]
    pool.allocate(1)
    assert pool.take_events().removed == [name(3)]
    assert pool.match([name(1)]), "younger ones left before it"
    pool.check_integrity()


def test_held_blocks_outlive_their_sequence() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(2)
    for number, block in enumerate(blocks):
        pool.seal(block, name(number))
    with pool.held(blocks):
        pool.release(blocks)
        pool.release(pool.allocate(2))
        with pytest.raises(OutOfBlocksError):
            pool.allocate(3)
        assert pool.match([name(0), name(1)]) == blocks
    assert pool.allocate(4)
    pool.check_integrity()
