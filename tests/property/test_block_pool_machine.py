"""The block pool against a model that knows only sets, dicts and a list in order of release."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.core.errors import OutOfBlocksError
from kvmesh.core.types import BlockHash
from kvmesh.kv.block_pool import BlockPool

NUM_BLOCKS = 12
HASHES = [BlockHash(bytes([number]) * 16) for number in range(8)]


def num_runs(blocks: list[int]) -> int:
    return sum(i == 0 or blocks[i - 1] + 1 != block for i, block in enumerate(blocks))


class BlockPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 4)
        self.sequences: list[list[int]] = []
        self.block_of: dict[BlockHash, int] = {}
        self.released: list[int] = []  # unreferenced hashed blocks, oldest first
        self.published: set[BlockHash] = set()

    def references(self, block: int) -> int:
        return sum(blocks.count(block) for blocks in self.sequences)

    def empty_blocks(self) -> set[int]:
        return {
            block
            for block in range(NUM_BLOCKS)
            if not self.references(block) and block not in self.released
        }

    def expected_evictions(self, n: int) -> None:
        for _ in range(n - len(self.empty_blocks())):
            self.evict_oldest()
        # One block more, an eighth of the pool, may go if that makes one run of the rest.
        if self.released and not self.fits_in_one_run(n) and len(self.empty_blocks()) == n:
            self.evict_oldest()
        # Then what is cached at the end of the tightest run without a block in use, if that is
        # the smaller part.
        fitting = [run for run in self.runs_without_references() if len(run) >= n]
        if not self.fits_in_one_run(n) and fitting:
            end = min(fitting, key=len).stop
            cached = [block for block in range(end - n, end) if block in self.released]
            for block in cached if len(cached) <= n // 2 else []:
                self.evict(block)

    def runs_without_references(self) -> list[range]:
        """The maximal ones, by first block."""
        free = [not self.references(block) for block in range(NUM_BLOCKS)]
        starts = [b for b in range(NUM_BLOCKS) if free[b] and (b == 0 or not free[b - 1])]
        ends = [b + 1 for b in range(NUM_BLOCKS) if free[b] and not any(free[b + 1 : b + 2])]
        return [range(*ends_of) for ends_of in zip(starts, ends, strict=True)]

    def evict_oldest(self) -> None:
        self.evict(self.released[0])

    def evict(self, block: int) -> None:
        self.released.remove(block)
        self.block_of = {h: b for h, b in self.block_of.items() if b != block}

    def fits_in_one_run(self, n: int) -> bool:
        empty = self.empty_blocks()
        return any(all(start + i in empty for i in range(n)) for start in range(NUM_BLOCKS))

    @rule(n=st.integers(0, NUM_BLOCKS))
    def start_sequence(self, n: int) -> None:
        if n > len(self.empty_blocks()) + len(self.released):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(n)
            return
        self.expected_evictions(n)
        empty, one_run = self.empty_blocks(), self.fits_in_one_run(n)
        blocks = self.pool.allocate(n)
        assert len(set(blocks)) == n
        assert set(blocks) <= empty
        assert not one_run or num_runs(blocks) <= 1
        self.sequences.append(blocks)

    @precondition(lambda self: any(self.sequences))
    @rule(data=st.data(), n=st.integers(1, 3))
    def extend_sequence(self, data: st.DataObject, n: int) -> None:
        blocks = data.draw(st.sampled_from([s for s in self.sequences if s]))
        if n > len(self.empty_blocks()) + len(self.released):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(n, after=blocks[-1])
            return
        self.expected_evictions(n)
        empty, one_run = self.empty_blocks(), self.fits_in_one_run(n)
        added = self.pool.allocate(n, after=blocks[-1])
        assert set(added) <= empty
        assert not one_run or num_runs(added) == 1
        follows = set(range(blocks[-1] + 1, blocks[-1] + 1 + n))
        assert set(added) == follows or not follows <= empty
        blocks += added

    @precondition(lambda self: any(self.sequences))
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    def seal(self, data: st.DataObject, block_hash: BlockHash) -> None:
        blocks = data.draw(st.sampled_from([s for s in self.sequences if s]))
        unsealed = [block for block in blocks if block not in self.block_of.values()]
        if not unsealed:
            return
        block = data.draw(st.sampled_from(unsealed))
        assert self.pool.seal(block, block_hash) == (block_hash not in self.block_of)
        self.block_of.setdefault(block_hash, block)

    @rule(hashes=st.lists(st.sampled_from(HASHES), max_size=5, unique=True))
    def share_prefix(self, hashes: list[BlockHash]) -> None:
        expected = []
        for block_hash in hashes:
            if block_hash not in self.block_of:
                break
            expected.append(self.block_of[block_hash])
        matched = self.pool.match(hashes)
        assert matched == expected
        self.pool.acquire(matched)
        self.released = [block for block in self.released if block not in matched]
        self.sequences.append(matched)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end_sequence(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        blocks = self.sequences.pop(index)
        self.pool.release(blocks)
        self.released += [
            block
            for block in reversed(blocks)
            if not self.references(block) and block in self.block_of.values()
        ]

    @rule()
    def clear_cached(self) -> None:
        assert self.pool.clear_cached() == len(self.released)
        self.block_of = {h: b for h, b in self.block_of.items() if b not in self.released}
        self.released = []

    @rule(hashes=st.lists(st.sampled_from(HASHES), max_size=4, unique=True))
    def hint(self, hashes: list[BlockHash]) -> None:
        found = [self.block_of[each] for each in hashes if each in self.block_of]
        first = [block for block in found if block in self.released]
        assert self.pool.evict_first(hashes) == len(first)
        self.released = first[::-1] + [block for block in self.released if block not in first]

    @rule()
    def publish(self) -> None:
        events = self.pool.take_events()
        assert self.published.isdisjoint(events.stored)
        assert self.published.issuperset(events.removed)
        self.published = self.published.union(events.stored).difference(events.removed)
        assert self.published == set(self.block_of)

    @invariant()
    def agrees_with_model(self) -> None:
        self.pool.check_integrity()
        assert set(self.pool.held_hashes()) == set(self.block_of)
        assert self.pool.num_free == len(self.empty_blocks()) + len(self.released)
        assert self.pool.is_idle == (not any(self.sequences))
        statistics = self.pool.statistics()
        assert statistics.num_evictable == len(self.released)
        assert statistics.num_empty == len(self.empty_blocks())

    def teardown(self) -> None:
        for blocks in self.sequences:
            self.pool.release(blocks)
        self.pool.clear_cached()
        assert self.pool.is_idle
        assert self.pool.statistics().num_free_segments == 1


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=60, stateful_step_count=40)
