"""Prompts come back to a pool that has evicted them: the same tokens, and less is computed."""

from __future__ import annotations

import os
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import pytest

from kvmesh.core.clock import ManualClock
from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import BlockHash, SequenceSpec
from kvmesh.engine.block_file import BlockFile
from kvmesh.engine.copier import Copier, InlineCopier
from kvmesh.engine.core import EngineCore
from kvmesh.engine.disk_store import DiskStore, passage_places
from kvmesh.engine.fake import FakeRunner
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.sequence import Sequence
from kvmesh.engine.tier_stores import HostStore, TierStore
from kvmesh.engine.tiered_cache import LoadResult, TieredCache
from kvmesh.kv.hashing import chain_hashes
from kvmesh.kv.tiers import Tier
from kvmesh.policy.linear_time import LinearTime
from kvmesh.policy.prompt_time import PromptTime
from tests.late_copier import LateCopier
from tests.worker_driver import make_spec, reference_tokens

KINDS = {
    "full": KvGroups(),
    "window": KvGroups((0, 24)),
    "state": KvGroups((0,), state_blocks=2),
    "all": KvGroups((0, 24), state_blocks=2),
}
LENGTH = 160
PLACES = 200


class Bench:
    """An engine of room for little more than one prompt, and a tier for all.

    Args:
        folder: of a tier on disk; without one it is in host memory.
    """

    def __init__(
        self,
        groups: KvGroups,
        num_blocks: int,
        copier: Copier | None = None,
        places: int = PLACES,
        folder: Path | None = None,
    ) -> None:
        self.groups = groups
        self.clock = ManualClock()
        self.runner = FakeRunner(num_blocks=num_blocks, groups=groups)
        self.core = EngineCore(self.runner.spec, num_blocks, growth_tokens=0)
        block_bytes = self.runner.spec.layout.block_bytes
        self.arena = HostArena(
            self.runner.kv, block_bytes, places if folder is None else passage_places(block_bytes)
        )
        self.tier = Tier("host" if folder is None else "disk", places)
        copier = copier or InlineCopier()
        store: TierStore = HostStore(self.arena, copier)
        if folder is not None:
            file = BlockFile(folder / "w.kv", "model", block_bytes, places)
            passage = range(self.arena.num_places)
            store = DiskStore(file, self.arena, passage, copier, InlineCopier())
        self.prompt_time = PromptTime(1000)
        self.tiers = TieredCache(
            self.core.pool, self.core.fills, [self.tier], [store], self.prompt_time, self.clock
        )

    def spec(self, stem: int) -> SequenceSpec:
        return make_spec([stem * 200 + position % 190 for position in range(LENGTH)], max_tokens=4)

    def admit(self, spec: SequenceSpec) -> Sequence:
        sequence = self.core.admit_prefill(spec, held=True)
        assert isinstance(sequence, Sequence), sequence
        sequence.hold_after_first = False
        return sequence

    def finish(self, sequence: Sequence) -> None:
        self.core.run(sequence)
        while self.core.has_work:
            chunks = self.core.plan_step()
            self.core.finish_step(chunks, self.runner.execute(chunks))
            self.core.check_integrity()
        spec = sequence.spec
        assert sequence.tokens[LENGTH:] == reference_tokens(spec, groups=self.groups)

    def ask(self, stem: int) -> list[LoadResult]:
        sequence = self.admit(self.spec(stem))
        results: list[LoadResult] = []
        self.tiers.load(self.core.begin_fill(sequence), results.append)
        self.finish(sequence)
        return results

    def keys(self, stem: int) -> list[BlockHash]:
        """Hashes of a prompt's blocks that may come from a cache."""
        spec = self.spec(stem)
        return chain_hashes(spec.root_hash, spec.token_ids, 16)[: (LENGTH - 1) // 16]

    def lower(self, keys: SequenceOf[BlockHash]) -> None:
        """Moves blocks of the pool to the tier."""
        pool = self.core.pool
        for copy in self.tiers.below.begin_write(0, keys):
            block = pool.find(copy.key)
            assert block is not None
            self.arena.store([block], [copy.place])
            self.tiers.below.end_write(0, copy, is_good=True)
        assert pool.evict_first(keys) == pool.clear_cached(len(keys)) == len(keys)

    def lose(self, key: BlockHash) -> None:
        """Drops a block's copy, as if it could not be read."""
        self.tiers.below.end_read(0, self.tier.begin_read(key), is_good=False)

    @property
    def computed(self) -> int:
        return self.core.token_totals[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_evicted_is_brought_back_and_not_computed(kind: str) -> None:
    bench = Bench(KINDS[kind], {"full": 16, "window": 32, "state": 28, "all": 44}[kind])
    for stem in range(4):
        bench.ask(stem)
    assert bench.core.pool.statistics().evicted_total > 0
    assert bench.computed == 4 * (LENGTH + 3)
    (result,) = bench.ask(0)
    assert result.num_loaded > 0
    assert result.num_blocks == (LENGTH - 1) // 16
    assert bench.computed == 4 * (LENGTH + 3) + 16 + 3
    assert bench.core.is_idle
    bench.tiers.check_integrity()


def test_a_copy_that_is_made_too_late_is_none() -> None:
    late = LateCopier()
    bench = Bench(KvGroups(), 16, late)
    bench.ask(0)
    assert late.jobs
    # Its blocks go to another prompt before they are read.
    bench.finish(bench.admit(bench.spec(1)))
    before = len(bench.tier)
    late.run_one()
    for key in list(bench.tier):
        block = bench.core.pool.find(key)
        copy = bench.tier.begin_read(key)
        size = bench.arena.block_bytes
        assert block is not None
        there = bench.arena._bytes[copy.place * size : (copy.place + 1) * size]
        assert there == bench.runner.kv.read_view(block, 1)
        bench.tier.end_read(copy, is_good=True)
    assert before == 0
    assert len(bench.tier) < 11


def test_copies_that_are_all_too_late_cost_nothing_but_themselves(tmp_path: Path) -> None:
    late = LateCopier()
    bench = Bench(KvGroups(), 16, late, folder=tmp_path)
    bench.ask(0)
    assert late.jobs
    bench.core.pool.clear_cached()
    late.catch_up()
    assert len(bench.tier) == 0
    assert bench.tiers.is_idle
    bench.finish(bench.admit(bench.spec(1)))
    late.catch_up()
    assert len(bench.tier) > 0
    bench.tiers.check_integrity()
    bench.tiers.close()


def test_a_prompt_is_copied_while_it_is_computed() -> None:
    bench = Bench(KvGroups(), 16)
    sequence = bench.admit(bench.spec(0))
    bench.core.run(sequence)
    while not bench.core.is_idle:
        copied = len(bench.tier)
        chunks = bench.core.plan_step()
        bench.core.finish_step(chunks, bench.runner.execute(chunks))
        bench.core.check_integrity()
    assert copied == LENGTH // 16  # at the last step, while it had all its blocks


def test_a_block_that_is_released_while_it_is_copied_is_copied_once() -> None:
    late = LateCopier()
    bench = Bench(KvGroups(), 16, late)
    sequence = bench.admit(bench.spec(0))
    bench.core.run(sequence)
    while bench.core.has_work:
        chunks = bench.core.plan_step()
        bench.core.finish_step(chunks, bench.runner.execute(chunks))
    assert late.jobs
    late.catch_up()
    assert bench.tiers.statistics()[0].stored_total == len(bench.tier) == LENGTH // 16
    assert not bench.core.pool.unsaved(16)
    bench.tiers.check_integrity()


@pytest.mark.parametrize(
    ("is_elsewhere", "reads", "is_copied"), [(False, 1, True), (True, 1, False), (True, 2, True)]
)
def test_the_last_copy_and_what_was_read_twice_is_copied_and_nothing_else(
    is_elsewhere: bool, reads: int, is_copied: bool
) -> None:
    """A prompt fits with room to spare, so that it is evicted only for others."""
    bench = Bench(KvGroups(), 48)
    bench.ask(0)
    spec = bench.spec(0)
    # The last block is computed again each time, since its last token is needed.
    keys = chain_hashes(spec.root_hash, spec.token_ids, 16)[:9]
    assert not len(bench.tier)
    if is_elsewhere:
        bench.core.pool.evict_first(keys)
    for _ in range(1, reads):
        bench.ask(0)
    for stem in (1, 2, 3, 4):
        bench.ask(stem)
    copied = [key in bench.tier for key in keys]
    assert all(copied) if is_copied else not any(copied)


def test_what_fits_the_pool_is_copied_by_nobody() -> None:
    bench = Bench(KvGroups(), 512)
    for stem in range(4):
        bench.ask(stem)
    assert len(bench.tier) == 0


def test_a_full_tier_keeps_what_was_used_last() -> None:
    bench = Bench(KvGroups(), 16, places=24)
    for stem in (0, 1, 2, 0, 3):
        bench.ask(stem)
    spec = bench.spec(0)
    sequence = bench.admit(spec)
    assert bench.tiers.pays(sequence.chain.hashes[:9], 0)
    bench.core.release(sequence)
    assert bench.tiers.statistics()[0].evicted_total > 0
    bench.tiers.check_integrity()


def test_loading_is_left_alone_where_computing_is_sooner() -> None:
    bench = Bench(KvGroups(), 16)
    for stem in range(3):
        bench.ask(stem)
    hashes = bench.admit(bench.spec(0)).chain.hashes[:9]
    assert bench.tiers.pays(hashes, 0)  # nothing is known yet
    bench.tiers._speeds[0] = LinearTime(0.0, 1.0)
    bench.prompt_time.add(100, 1.0)
    assert not bench.tiers.pays(hashes, 0)
    bench.tiers._speeds[0] = LinearTime(0.0, 0.01)
    assert bench.tiers.pays(hashes, 0)


def test_a_slow_load_of_one_block_says_little_about_nine() -> None:
    late = LateCopier()
    bench = Bench(KvGroups(), 16, late)
    for stem in range(3):
        bench.ask(stem)
        late.catch_up()
    bench.prompt_time.add(100, 0.01)
    hashes = bench.admit(bench.spec(0)).chain.hashes
    bench.tiers.load(bench.core.fills.begin(hashes[:1]), lambda _: None)
    bench.clock.advance(0.005)
    late.catch_up()
    assert bench.tiers.token_s("host") < 0.0001
    assert bench.tiers.pays(hashes[:9], 1), "8 blocks are computed in 12.8 ms"


def test_host_memory_that_holds_less_than_a_burst_loses_nothing_while_the_pool_can_wait(
    tmp_path: Path,
) -> None:
    disk = LateCopier()
    bench = Bench(KvGroups(), 32)
    block_bytes, num_host = bench.runner.spec.layout.block_bytes, 8
    arena = HostArena(bench.runner.kv, block_bytes, num_host + passage_places(block_bytes))
    passage = range(num_host, arena.num_places)
    file = BlockFile(tmp_path / "w.kv", "model", block_bytes, PLACES)
    spill = DiskStore(file, arena, passage, InlineCopier(), disk)
    tiers = [Tier("host", num_host), Tier("disk", PLACES)]
    core = bench.core
    stores: list[TierStore] = [HostStore(arena, InlineCopier()), spill]
    bench.tiers = TieredCache(
        core.pool, core.fills, tiers, stores, bench.prompt_time, bench.clock, spill
    )
    for stem in (0, 1):
        bench.finish(bench.admit(bench.spec(stem)))
    # Copies to disk begin now, one after the other.
    disk.catch_up()
    spec = bench.spec(0)
    for key in chain_hashes(spec.root_hash, spec.token_ids, 16)[:9]:
        assert key in tiers[1], "the first prompt is on disk"
    bench.tiers.check_integrity()
    bench.tiers.close()


def test_a_prompt_that_ends_meanwhile_leaves_nothing() -> None:
    late = LateCopier()
    bench = Bench(KvGroups(), 16, late)
    for stem in range(3):
        bench.ask(stem)
        late.catch_up()
    sequence = bench.admit(bench.spec(0))
    results: list[LoadResult] = []
    bench.tiers.load(bench.core.begin_fill(sequence), results.append)
    assert late.jobs
    bench.core.release(sequence)
    assert not bench.core.is_idle  # somebody writes there
    late.catch_up()
    assert bench.core.is_idle
    assert results
    assert bench.tiers.is_idle


def test_blocks_after_a_gap_are_not_resumed_from() -> None:
    bench = Bench(KvGroups(), 48)
    bench.ask(0)
    keys, gap = bench.keys(0), 4
    bench.lower(keys)
    bench.lose(keys[gap])
    assert bench.core.fills.rooms.resumable(keys) == gap
    before = bench.computed
    (result,) = bench.ask(0)
    assert (result.num_blocks, result.num_loaded) == (gap, gap)
    assert bench.computed - before == LENGTH - 16 * gap + 3
    assert bench.core.is_idle


async def test_blocks_after_one_that_cannot_be_read_are_not_resumed_from(tmp_path: Path) -> None:
    bench = Bench(KvGroups(), 16, folder=tmp_path)
    for stem in range(3):
        bench.ask(stem)
    keys, gap = bench.keys(0), 4
    damaged, size = bench.tier.begin_read(keys[gap]), bench.arena.block_bytes
    with (tmp_path / "w.kv").open("r+b") as file:
        file.seek(-(PLACES - damaged.place) * size, os.SEEK_END)
        file.write(b"damage")
    bench.tier.end_read(damaged, is_good=True)
    before = bench.computed
    (result,) = bench.ask(0)
    assert (result.num_blocks, result.num_loaded) == (gap, gap)
    assert bench.computed - before == LENGTH - 16 * gap + 3
    assert bench.core.is_idle
    bench.tiers.close()


def test_cached_blocks_after_a_gap_are_kept_while_the_gap_is_loaded() -> None:
    late = LateCopier()
    bench = Bench(KvGroups(), 48, late)
    bench.ask(0)
    keys, num_lower = bench.keys(0), 3
    bench.lower(keys[:num_lower])
    behind = [bench.core.pool.find(key) for key in keys[num_lower:]]
    assert None not in behind
    results: list[LoadResult] = []
    bench.tiers.load(bench.core.fills.begin(keys), results.append)
    bench.core.pool.clear_cached()  # others need the room
    late.catch_up()
    (result,) = results
    assert (result.num_blocks, result.num_loaded) == (len(keys), len(keys))
    assert [bench.core.pool.find(key) for key in keys[num_lower:]] == behind
    assert bench.tiers.statistics()[0].loaded_total == num_lower
    before = bench.computed
    bench.finish(bench.admit(bench.spec(0)))
    assert bench.computed - before == LENGTH - 16 * len(keys) + 3
    assert bench.core.is_idle
