"""Pool and tiers in any order of evictions, copies, loads, losses and crashes: no block has two
owners, and what others are told is what is here."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.core.block_names import DISK, HOST, IN_TIER, TELLS_TIERS
from kvmesh.core.types import BlockHash
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.lower_copies import UnsavedBlock
from kvmesh.kv.tiers import Copy, Tier, Tiers

NUM_BLOCKS = 5
NAMES = (HOST, DISK)
HASHES = [BlockHash(bytes((number, *range(100, 115)))) for number in range(12)]


class TierMachine(RuleBasedStateMachine):
    """Content is a number per hash; memory of the pool and of each tier is a dict."""

    places = (5, 6)

    def __init__(self) -> None:
        super().__init__()
        self.start({}, [])

    def start(self, disk: dict[int, BlockHash], kept: list[Copy]) -> None:
        """A process begins, with what an earlier one left on disk."""
        self.pool = BlockPool(NUM_BLOCKS, 4)
        self.tiers = Tiers(
            [Tier(name, size) for name, size in zip(NAMES, self.places, strict=True)],
            self.pool.lost_below,
        )
        self.tiers[1].adopt(kept)
        self.pool.below = self.tiers
        self.blocks: dict[int, BlockHash] = {}
        self.memory: list[dict[int, BlockHash]] = [{}, disk]
        self.sequences: list[list[int]] = []
        self.published: set[BlockHash] = set()
        self.down: list[tuple[UnsavedBlock, Copy, BlockHash]] = []
        self.lower: list[tuple[Copy, Copy]] = []
        self.reads: list[tuple[int, Copy]] = []

    @rule(hashes=st.lists(st.sampled_from(HASHES), min_size=1, max_size=4, unique=True))
    def compute(self, hashes: list[BlockHash]) -> None:
        """A sequence takes blocks, and what it computes can be shared."""
        if len(hashes) > self.pool.num_free:
            return
        blocks = self.pool.allocate(len(hashes))
        for block, key in zip(blocks, hashes, strict=True):
            self.blocks[block] = key
            self.pool.seal(block, key)
        self.sequences.append(blocks)

    @rule(hashes=st.lists(st.sampled_from(HASHES), min_size=2, max_size=5, unique=True))
    def compute_and_end(self, hashes: list[BlockHash]) -> None:
        num_before = len(self.sequences)
        self.compute(hashes)
        for blocks in self.sequences[num_before:]:
            self.pool.release(blocks)
        del self.sequences[num_before:]

    @rule(key=st.sampled_from(HASHES))
    def share(self, key: BlockHash) -> None:
        block = self.pool.find(key)
        if block is not None:
            assert self.blocks[block] == key
            self.pool.acquire([block])
            self.sequences.append([block])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end_sequence(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        self.pool.release(self.sequences.pop(index))

    @rule(limit=st.integers(1, 4), may_lose=st.booleans())
    def begin_down(self, limit: int, may_lose: bool) -> None:
        """Copies from the pool begin: now, or some time before they end, bytes are read."""
        chosen = {each.key: each for each in self.pool.unsaved(limit)}
        only_there = set(self.tiers[0].unsaved(NUM_BLOCKS))
        copies = self.tiers.begin_write(0, chosen, may_lose=may_lose)
        assert may_lose or only_there <= set(self.tiers[0])
        self.pool.saving([chosen[copy.key] for copy in copies])
        for copy in copies:
            block = chosen[copy.key]
            self.down.append((block, copy, self.blocks[block.block]))

    @precondition(lambda self: self.down)
    @rule(data=st.data(), early=st.booleans())
    def end_down(self, data: st.DataObject, early: bool) -> None:
        block, copy, seen = self.down.pop(data.draw(st.integers(0, len(self.down) - 1)))
        self.memory[0][copy.place] = seen if early else self.blocks[block.block]
        self.tiers.end_write(0, copy, is_good=self.pool.is_same(block))

    @rule(limit=st.integers(1, 4))
    def begin_lower(self, limit: int) -> None:
        upper = self.tiers[0].unsaved(limit)
        for copy in self.tiers.begin_write(1, upper):
            source = self.tiers[0].begin_read(copy.key)
            self.lower.append((source, copy))

    @precondition(lambda self: self.lower)
    @rule(data=st.data(), fails=st.booleans())
    def end_lower(self, data: st.DataObject, fails: bool) -> None:
        source, copy = self.lower.pop(data.draw(st.integers(0, len(self.lower) - 1)))
        self.memory[1][copy.place] = self.memory[0][source.place]
        self.tiers.end_spill(source, copy, is_good=not fails)

    @rule(keys=st.lists(st.sampled_from(HASHES), min_size=1, max_size=4, unique=True))
    def begin_load(self, keys: list[BlockHash]) -> None:
        found = self.tiers.begin_read(keys)
        for level, copies in found.items():
            assert [copy.key for copy in copies] == [k for k in keys if self.tiers.find(k) == level]
            self.reads += [(level, copy) for copy in copies]

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), is_good=st.booleans())
    def end_load(self, data: st.DataObject, is_good: bool) -> None:
        level, copy = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        assert self.memory[level][copy.place] == copy.key
        self.tiers.end_read(level, copy, is_good=is_good)

    @rule(hashes=st.lists(st.sampled_from(HASHES), max_size=4, unique=True))
    def hint(self, hashes: list[BlockHash]) -> None:
        self.pool.evict_first(hashes)
        unsaved = {each.block for each in self.pool.unsaved(NUM_BLOCKS)}
        evictable = {block for block in unsaved if not self.pool._references[block]}
        assert not {self.blocks[block] for block in evictable} & set(hashes)

    @rule()
    def crash(self) -> None:
        """The next life finds what was written whole, and others forget all of the last one."""
        disk, kept = self.tiers[1], []
        for key in list(disk):
            kept.append(disk.begin_read(key))
            disk.end_read(kept[-1], is_good=True)
        self.start(self.memory[1], kept)
        self.publish()
        assert {key for key in HASHES if IN_TIER[DISK](key) in self.published} == {
            copy.key for copy in kept
        }

    @rule()
    def clear_cached(self) -> None:
        self.pool.clear_cached()

    @rule()
    def publish(self) -> None:
        events = self.pool.take_events()
        assert self.published.isdisjoint(events.stored)
        assert self.published.issuperset(events.removed)
        self.published = self.published.union(events.stored).difference(events.removed)
        held = {key for key in HASHES if self.pool.find(key) is not None or key in self.tiers}
        assert held == set(self.pool.held_hashes())
        lower = {
            IN_TIER[tier](key)
            for key in held
            if self.pool.find(key) is None and (tier := self.tiers.tier_of(key)) is not None
        }
        assert self.published == {*held, *lower, TELLS_TIERS} == set(self.pool.told_names())

    @invariant()
    def records_agree(self) -> None:
        self.pool.check_integrity()
        self.tiers.check_integrity()
        for level, memory in enumerate(self.memory):
            tier = self.tiers[level]
            for key in list(tier):
                copy = tier.begin_read(key)
                assert memory[copy.place] == key, "a copy of something else can be read"
                tier.end_read(copy, is_good=True)

    def teardown(self) -> None:
        for blocks in self.sequences:
            self.pool.release(blocks)
        assert self.pool.is_idle
        while self.down:
            block, copy, seen = self.down.pop()
            self.memory[0][copy.place] = seen
            self.tiers.end_write(0, copy, is_good=self.pool.is_same(block))
        for source, copy in self.lower:
            self.tiers.end_spill(source, copy, is_good=False)
        for level, copy in self.reads:
            self.tiers.end_read(level, copy, is_good=True)
        self.records_agree()
        self.publish()


TestTiers = TierMachine.TestCase
TestTiers.settings = settings(max_examples=100, stateful_step_count=50)
