from __future__ import annotations

import pytest

from kvmesh.core.errors import OutOfBlocksError
from kvmesh.core.kv_groups import KvGroups
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.groups import HOLE
from kvmesh.kv.hashing import HashChain, root_hash
from kvmesh.kv.sequence_blocks import STATE, BlockSpot, GroupCache, SequenceBlocks

SIZE = 4
ROOT = root_hash("m")
TOKENS = list(range(100, 160))


class Bench:
    """A pool, and one sequence after the other over the same tokens."""

    def __init__(self, groups: KvGroups, num_blocks: int = 64, interval: int = 8) -> None:
        self.groups = groups
        self.pool = BlockPool(num_blocks, SIZE)
        self.cache = GroupCache(self.pool, groups, interval)

    def hashes(self, length: int) -> HashChain:
        return HashChain(ROOT, SIZE, TOKENS[:length])

    def compute(self, length: int, prompt: int, chunk: int = 5) -> SequenceBlocks:
        """A sequence of `length` tokens, computed in chunks, decode one by one."""
        chain = self.hashes(length)
        blocks = self.cache.resume(chain.hashes[: (prompt - 1) // SIZE])
        start = blocks.num_sealed * SIZE
        while start < length:
            end = min(start + chunk, prompt) if start < prompt else start + 1
            self.cache.grow(blocks, start, end)
            self.cache.plan_saves(blocks, start, end, prompt, chain.hashes)
            self.cache.finish_step(blocks, end, chain.hashes)
            self.cache.check_integrity(blocks, end)
            start = end
        return blocks


def test_only_the_window_is_kept() -> None:
    bench = Bench(KvGroups((0, 6)))
    blocks = bench.compute(41, prompt=41)
    full, window = blocks.tables
    assert HOLE not in full
    assert len(full) == len(window) == 11
    # The query at 41 sees positions from 36 on.
    assert [index for index, block in enumerate(window) if block != HOLE] == [9, 10]
    bench.cache.release(blocks)
    assert bench.pool.is_idle


def test_blocks_behind_the_window_stay_findable_until_their_room_is_needed() -> None:
    bench = Bench(KvGroups((0, 6)))
    first = bench.compute(41, prompt=41)
    chain = bench.hashes(22)
    second = bench.cache.resume(chain.hashes)
    assert second.num_sealed == 5
    assert second.tables[1][:3] == [HOLE] * 3
    assert second.tables[0] == first.tables[0][:5]
    for blocks in (first, second):
        bench.cache.release(blocks)
    assert bench.pool.is_idle


def test_a_state_is_resumed_where_it_was_saved() -> None:
    bench = Bench(KvGroups((0,), state_blocks=2))
    first = bench.compute(43, prompt=27)
    bench.cache.release(first, bench.hashes(43).hashes)
    # Every 8 positions, at 24 before the prompt's end, and at 40 where generation was last.
    for length, resumed in ((9, 8), (23, 16), (26, 24), (36, 24), (41, 40), (60, 40)):
        blocks = bench.cache.resume(bench.hashes(length).hashes)
        assert (blocks.num_sealed * SIZE, len(blocks.source)) == (resumed, 2)
        bench.cache.release(blocks)
    assert bench.pool.is_idle


def test_a_state_is_not_resumed_when_a_part_of_it_is_gone() -> None:
    bench = Bench(KvGroups((0,), state_blocks=2), num_blocks=20)
    bench.cache.release(bench.compute(17, prompt=17))
    bench.pool.release(bench.pool.allocate(20 - 7))  # evicts from the front of the cache
    blocks = bench.cache.resume(bench.hashes(17).hashes)
    assert blocks.num_sealed in (0, 4)
    bench.cache.release(blocks)
    bench.pool.check_integrity()


def test_the_rolling_state_goes_before_anyone_is_preempted() -> None:
    bench = Bench(KvGroups((0,), state_blocks=2))
    chain = bench.hashes(30)
    blocks = bench.compute(30, prompt=9)
    assert blocks.rolling_at == 28
    assert bench.cache.drop_rolling(blocks, chain.hashes)
    assert not bench.cache.drop_rolling(blocks, chain.hashes)
    resumed = bench.cache.resume(chain.hashes)
    assert resumed.num_sealed == 7
    for each in (blocks, resumed):
        bench.cache.release(each)
    assert bench.pool.is_idle


def test_without_room_for_a_saved_state_the_step_goes_on() -> None:
    bench = Bench(KvGroups((0,), state_blocks=2), num_blocks=4 + 2)
    blocks = bench.compute(16, prompt=16)
    assert bench.pool.num_free == 0
    with pytest.raises(OutOfBlocksError):
        bench.cache.grow(blocks, 16, 17)
    bench.cache.release(blocks)
    assert bench.pool.is_idle


def test_a_reservation_takes_the_window_at_the_end_and_may_be_computed_here() -> None:
    bench = Bench(KvGroups((0, 6), state_blocks=1))
    chain = bench.hashes(41)
    blocks = bench.cache.resume(chain.hashes)
    bench.cache.reserve(blocks, 41, 6)
    reserved = [block for block in blocks.tables[1] if block != HOLE]
    assert blocks.tables[1][:9] == [HOLE] * 9
    assert len(blocks.tables[0]) == len(blocks.tables[1]) == 12
    for start in range(0, 41, 4):
        end = min(start + 4, 41)
        bench.cache.grow(blocks, start, end)
        bench.cache.finish_step(blocks, end, chain.hashes)
        bench.cache.check_integrity(blocks, end)
    assert [block for block in blocks.tables[1] if block != HOLE] == reserved
    bench.cache.release(blocks)
    assert bench.pool.is_idle


def test_only_the_first_group_is_told_to_others() -> None:
    bench = Bench(KvGroups((0, 6), state_blocks=1))
    bench.cache.release(bench.compute(20, prompt=20))
    expected = list(bench.hashes(20).hashes)
    assert bench.pool.take_events().stored == expected
    assert bench.pool.held_hashes() == expected


def test_a_sequence_is_rebuilt_from_what_is_cached_and_fresh_blocks() -> None:
    bench = Bench(KvGroups((0, 6)))
    blocks = bench.compute(41, prompt=41)
    full, window = map(list, blocks.tables)
    held, num_sealed = bench.cache.contents(blocks, 41), blocks.num_sealed
    assert held == {
        **{BlockSpot(0, index): block for index, block in enumerate(full)},
        **{BlockSpot(1, index): window[index] for index in (9, 10)},
    }
    bench.cache.release(blocks)
    hashes = bench.hashes(41).hashes
    rebuilt, fresh = bench.cache.rebuild(list(held), num_sealed, hashes)
    assert fresh.keys() == {BlockSpot(0, 10), BlockSpot(1, 10)}  # a block that was not full
    assert rebuilt.tables == [
        [*full[:10], fresh[BlockSpot(0, 10)]],
        [*[HOLE] * 9, window[9], fresh[BlockSpot(1, 10)]],
    ]
    assert rebuilt.num_sealed == 10
    bench.cache.release(rebuilt)
    # What was evicted meanwhile comes back into fresh blocks, too.
    bench.pool.release(bench.pool.allocate(64))
    rebuilt, fresh = bench.cache.rebuild(list(held), num_sealed, hashes)
    assert fresh.keys() == held.keys()
    assert rebuilt.num_sealed == 0
    bench.cache.release(rebuilt)
    assert bench.pool.is_idle


def test_a_state_is_rebuilt_in_fresh_blocks() -> None:
    bench = Bench(KvGroups((0,), state_blocks=2), num_blocks=20)
    blocks = bench.compute(14, prompt=14)
    held, num_sealed = bench.cache.contents(blocks, 14), blocks.num_sealed
    assert [held[BlockSpot(STATE, part)] for part in (0, 1)] == blocks.state
    hashes = bench.hashes(14).hashes
    taken = bench.pool.allocate(bench.pool.num_free)
    with pytest.raises(OutOfBlocksError):
        bench.cache.rebuild(list(held), num_sealed, hashes)
    bench.pool.release(taken)
    bench.cache.release(blocks)
    rebuilt, fresh = bench.cache.rebuild(list(held), num_sealed, hashes)
    assert rebuilt.state == [fresh[BlockSpot(STATE, part)] for part in (0, 1)]
    assert len(rebuilt.tables[0]) == 4
    bench.cache.release(rebuilt)
    assert bench.pool.is_idle
