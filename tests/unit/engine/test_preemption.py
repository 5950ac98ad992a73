"""Preempted sequences whose KV waits in host memory: the same tokens, less computed again."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import pytest

from kvmesh.core.clock import ManualClock
from kvmesh.engine.core import EngineCore
from kvmesh.engine.fake import FakeRunner
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.sequence import Sequence, SequenceState
from kvmesh.engine.swap_space import SwapSpace, SwapStatistics
from kvmesh.policy.prompt_time import PromptTime
from tests.worker_driver import make_spec, reference_tokens

PROMPTS = [[100 * number + position % 90 for position in range(60)] for number in range(1, 4)]
NEW_TOKENS = 30


class SlowArena(HostArena):
    """Its copies take time on a clock."""

    clock: ManualClock

    def store(self, blocks: SequenceOf[int], places: SequenceOf[int]) -> None:
        self.clock.advance(1.0)
        super().store(blocks, places)


class Bench:
    """A pool for two of three sequences."""

    def __init__(self, places: int) -> None:
        self.clock = ManualClock()
        self.runner = FakeRunner(num_blocks=12)
        block_bytes = self.runner.spec.layout.block_bytes
        self.arena = SlowArena(self.runner.kv, block_bytes, places or 1)
        self.arena.clock = self.clock
        self.prompt_time = PromptTime(1000)
        self.swap = SwapSpace(self.arena, self.prompt_time, self.clock)
        self.core = EngineCore(
            self.runner.spec, 12, growth_tokens=0, swap=self.swap if places else None
        )

    def admit_all(self) -> list[Sequence]:
        sequences = []
        for prompt in PROMPTS:
            sequence = self.core.admit_decode(make_spec(prompt, NEW_TOKENS))
            assert isinstance(sequence, Sequence), sequence
            self.core.run(sequence)
            sequences.append(sequence)
        return sequences

    def step(self) -> None:
        chunks = self.core.plan_step()
        self.core.finish_step(chunks, self.runner.execute(chunks))
        self.core.check_integrity()

    def run(self) -> list[Sequence]:
        sequences = self.admit_all()
        while self.core.has_work:
            self.step()
        for prompt, sequence in zip(PROMPTS, sequences, strict=True):
            wanted = reference_tokens(make_spec(prompt, NEW_TOKENS))
            assert sequence.tokens[len(prompt) :] == wanted
        assert self.core.is_idle
        assert self.arena.num_free == self.arena.num_places
        return sequences


@pytest.mark.parametrize(("places", "swaps"), [(12, True), (3, False), (0, False)])
def test_the_same_tokens_with_and_without_room(places: int, swaps: bool) -> None:
    bench = Bench(places)
    bench.run()
    now = bench.core.statistics()
    assert now.preemptions_total > 0
    assert (now.swap.swapped_out_total > 0) is swaps
    assert now.swap.swapped_in_total == now.swap.swapped_out_total
    # Each prompt and each token but the last once, unless something was computed again.
    once = sum(len(prompt) + NEW_TOKENS - 1 for prompt in PROMPTS)
    assert (now.computed_tokens_total == once) is swaps


def test_copies_that_cost_more_than_computing_are_left() -> None:
    bench = Bench(12)
    bench.prompt_time.add(1000, 1e-6)
    bench.run()
    bench.run()
    now = bench.core.statistics()
    # The first one showed what a copy costs.
    assert now.preemptions_total > 1
    assert now.swap.swapped_out_total == 1


def test_a_sequence_that_ends_while_it_waits_leaves_nothing() -> None:
    bench = Bench(12)
    sequences = bench.admit_all()
    while not bench.core.statistics().num_preempted:
        bench.step()
    assert bench.core.statistics().swap.blocks_kept > 0
    waiting = [each for each in sequences if each.state is SequenceState.PREEMPTED]
    for sequence in waiting:
        bench.core.release(sequence)
    bench.core.check_integrity()
    assert bench.core.statistics().swap == SwapStatistics(0, len(waiting), 0)
    for sequence in sequences:
        bench.core.release(sequence)
    assert bench.core.is_idle


def test_a_sequence_that_loses_nothing_makes_copies_no_cheaper() -> None:
    bench = Bench(12)
    bench.prompt_time.add(1000, 1e-6)
    bench.run()
    fresh = bench.core.admit_decode(make_spec([1, 2, 3], NEW_TOKENS))
    assert isinstance(fresh, Sequence), fresh
    bench.core.run(fresh)
    for _ in range(1000):
        assert not bench.swap.keep(fresh, fresh.kv, bench.core._cache, lambda: None)
    bench.core.release(fresh)
    bench.run()
    assert bench.core.statistics().swap.swapped_out_total == 1
