from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmesh.core.errors import StructureError
from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import FinishReason, Refusal, RefusalReason, Structure, StructureKind
from kvmesh.engine.core import EngineCore
from kvmesh.engine.fake import FakeRunner
from kvmesh.engine.protocol import EmbeddingSpec, SampledToken
from kvmesh.engine.sequence import Emission, Sequence, SequenceState
from kvmesh.engine.structure import StructureCompiler
from kvmesh.policy.batching import BatchLimits
from tests.unit.gateway.tiny_model import EOS, make_tokenizer
from tests.worker_driver import make_spec, reference_tokens


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 1000) for _ in range(length)]


class Bench:
    """A core and its runner, stepped by hand."""

    def __init__(self, num_blocks: int = 64, **limits: int) -> None:
        self.runner = FakeRunner(num_blocks=num_blocks)
        self.core = EngineCore(self.runner.spec, num_blocks, BatchLimits(**limits), growth_tokens=0)

    def admit(self, tokens: list[int], max_tokens: int = 8, **sampling: Any) -> Sequence:
        sequence = self.core.admit_decode(make_spec(tokens, max_tokens, **sampling))
        assert isinstance(sequence, Sequence), sequence
        return sequence

    def step(self) -> int:
        chunks = self.core.plan_step()
        self.core.finish_step(chunks, self.runner.execute(chunks))
        self.core.check_integrity()
        return len(chunks)

    def finish(self) -> None:
        while self.core.has_work:
            self.step()


def test_a_sequence_alone_ends_with_length_and_leaves_nothing() -> None:
    bench = Bench()
    emissions: list[Emission] = []
    sequence = bench.admit(prompt(50), max_tokens=5)
    sequence.on_emission = emissions.append
    bench.core.run(sequence)
    bench.finish()
    assert [emission.position for emission in emissions] == [50, 51, 52, 53, 54]
    assert [emission.finish_reason for emission in emissions] == [None] * 4 + [FinishReason.LENGTH]
    assert bench.core.is_idle


@pytest.mark.parametrize("max_tokens", [1, 7, 64, 512])
def test_chunk_size_does_not_change_the_tokens(max_tokens: int) -> None:
    spec = make_spec(prompt(100), max_tokens=10)
    bench = Bench(max_tokens=max_tokens)
    sequence = bench.admit(list(spec.token_ids), max_tokens=10)
    bench.core.run(sequence)
    bench.finish()
    assert sequence.tokens[100:] == reference_tokens(spec)


def test_cached_prefix_is_used_but_never_the_last_token() -> None:
    bench = Bench()
    for _ in range(2):
        sequence = bench.admit(prompt(64), max_tokens=3)
        bench.core.run(sequence)
        bench.finish()
    assert sequence.num_cached == 48
    assert sequence.tokens[64:] == reference_tokens(make_spec(prompt(64), max_tokens=3))
    assert bench.core.is_idle


def test_generated_blocks_are_reused_by_the_next_turn() -> None:
    bench = Bench()
    first = bench.admit(prompt(40), max_tokens=30)
    bench.core.run(first)
    bench.finish()
    turn = bench.admit([*first.tokens, 5, 6, 7])
    # 69 positions have KV: the last generated token was never computed.
    assert turn.num_cached == 64
    bench.core.release(turn)
    assert bench.core.is_idle


def test_a_prefill_stops_after_the_first_token_and_keeps_its_blocks() -> None:
    bench = Bench()
    sequence = bench.core.admit_prefill(make_spec(prompt(40)))
    assert isinstance(sequence, Sequence)
    bench.finish()
    assert sequence.state is SequenceState.HELD
    assert len(sequence.tokens) == 41
    assert len(sequence.blocks) == 3
    bench.core.release(sequence)
    bench.core.release(sequence)
    assert bench.core.is_idle


def test_stop_tokens_wait_for_min_tokens_and_yield_to_ignore_eos() -> None:
    first, second, third = reference_tokens(make_spec(prompt(20), max_tokens=3))
    assert len({first, second, third}) == 3
    for sampling, generated in (
        ({"stop_token_ids": (second,)}, 2),
        ({"stop_token_ids": (first, third), "min_tokens": 1}, 3),
        ({"stop_token_ids": (first,)}, 1),
    ):
        bench = Bench()
        sequence = bench.admit(prompt(20), max_tokens=9, **sampling)
        emissions: list[Emission] = []
        sequence.on_emission = emissions.append
        bench.core.run(sequence)
        bench.finish()
        assert len(emissions) == generated
        assert emissions[-1].finish_reason is FinishReason.STOP


def test_release_in_flight_keeps_the_blocks_until_the_step_is_back() -> None:
    bench = Bench()
    sequence = bench.admit(prompt(40))
    bench.core.run(sequence)
    chunks = bench.core.plan_step()
    free = bench.core.pool.num_free
    bench.core.release(sequence)
    assert bench.core.pool.num_free == free
    assert not bench.core.is_idle
    bench.core.finish_step(chunks, bench.runner.execute(chunks))
    assert bench.core.is_idle


def test_preemption_takes_the_youngest_and_changes_no_token() -> None:
    bench = Bench(num_blocks=10)
    specs = [make_spec(prompt(40, seed), max_tokens=60) for seed in range(3)]
    sequences = [bench.admit(list(spec.token_ids), max_tokens=60) for spec in specs]
    for sequence in sequences:
        bench.core.run(sequence)
    oldest_was_preempted = False
    while bench.core.has_work:
        bench.step()
        oldest_was_preempted |= sequences[0].state is SequenceState.PREEMPTED
    assert bench.core.statistics().preemptions_total > 0
    assert not oldest_was_preempted
    for sequence, spec in zip(sequences, specs, strict=True):
        assert sequence.tokens[40:] == reference_tokens(spec)
    assert bench.core.is_idle


def test_admission_waits_for_preempted_sequences() -> None:
    bench = Bench(num_blocks=8)
    for seed in range(2):
        bench.core.run(bench.admit(prompt(62, seed), max_tokens=40))
    while not bench.core.statistics().num_preempted:
        bench.step()
    refusal = bench.core.admit_decode(make_spec(prompt(5)))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.NO_BLOCKS
    bench.finish()
    assert bench.core.is_idle


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (prompt(64 * 16), RefusalReason.TOO_LONG),
        ([1, 2, 1000], RefusalReason.INVALID),
    ],
)
def test_what_can_never_run_is_refused(tokens: list[int], reason: RefusalReason) -> None:
    refusal = Bench().core.admit_decode(make_spec(tokens))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is reason


def test_no_blocks_is_refused_and_takes_nothing() -> None:
    bench = Bench(num_blocks=4)
    held = bench.admit(prompt(40))
    refusal = bench.core.admit_decode(make_spec(prompt(40, 1)))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.NO_BLOCKS
    bench.core.release(held)
    assert bench.core.is_idle


def test_a_scored_prompt_is_computed_whole_and_told_with_the_first_token() -> None:
    bench = Bench(max_tokens=24)
    plain = bench.admit(prompt(64), max_tokens=1)
    bench.core.run(plain)
    bench.finish()
    emissions: list[Emission] = []
    sequence = bench.admit(prompt(64), max_tokens=3, num_prompt_logprobs=1)
    assert sequence.num_cached == 0
    sequence.on_emission = emissions.append
    bench.core.run(sequence)
    bench.finish()
    scores = emissions[0].prompt_logprobs
    assert [entry.top_ids for entry in scores] == [(token,) for token in prompt(64)[1:]]
    assert [len(emission.prompt_logprobs) for emission in emissions] == [63, 0, 0]


def test_preemption_scores_no_prompt_token_twice() -> None:
    bench = Bench(num_blocks=9, max_tokens=24)
    older = bench.admit(prompt(60, seed=1), max_tokens=60)
    younger = bench.admit(prompt(50, seed=2), max_tokens=2, num_prompt_logprobs=0)
    emissions: list[Emission] = []
    younger.on_emission = emissions.append
    for sequence in (older, younger):
        bench.core.run(sequence)
    for _ in range(4):  # in the middle of the younger one's prompt
        bench.step()
    assert 0 < len(younger.prompt_logprobs) < 49
    bench.core._running.preempt(younger)
    bench.finish()
    scores = emissions[0].prompt_logprobs
    alone = Bench()
    expected: list[Emission] = []
    same = alone.admit(prompt(50, seed=2), max_tokens=2, num_prompt_logprobs=0)
    same.on_emission = expected.append
    alone.core.run(same)
    alone.finish()
    assert scores == expected[0].prompt_logprobs
    assert [e.token_id for e in emissions] == [e.token_id for e in expected]


class BrokenConstraint:
    ready = True

    def allowed(self, generated: Any) -> Any:
        raise StructureError("cannot go on")


def test_a_structure_that_cannot_go_on_ends_the_sequence_alone() -> None:
    bench = Bench()
    structure = Structure(StructureKind.REGEX, "a")
    refused = bench.core.admit_decode(make_spec(prompt(5), structure=structure))
    assert isinstance(refused, Refusal)
    assert refused.reason is RefusalReason.INVALID
    bench.core = EngineCore(
        bench.runner.spec, 64, growth_tokens=0, constrain=lambda _: BrokenConstraint()
    )
    emissions: list[Emission] = []
    sequence = bench.admit(prompt(5), structure=structure)
    other = bench.admit(prompt(6))
    sequence.on_emission = emissions.append
    for each in (sequence, other):
        bench.core.run(each)
    bench.finish()
    assert [(e.finish_reason, e.error) for e in emissions] == [(FinishReason.ERROR, "cannot go on")]
    assert other.num_generated == 8
    assert bench.core.is_idle


class LateConstraint:
    """Allows one token, once it is ready."""

    def __init__(self) -> None:
        self.ready = False

    def allowed(self, generated: Any) -> Any:
        assert self.ready, "asked before it is ready"
        return np.arange(1000) == 7


def test_a_sequence_waits_for_its_structure_and_the_others_go_on() -> None:
    late = LateConstraint()
    bench = Bench()
    bench.core = EngineCore(bench.runner.spec, 64, growth_tokens=0, constrain=lambda _: late)
    structure = Structure(StructureKind.REGEX, "a")
    waiting = bench.admit(prompt(5), max_tokens=3, structure=structure)
    other = bench.admit(prompt(6), max_tokens=4)
    for each in (waiting, other):
        bench.core.run(each)
    for _ in range(4):
        assert bench.step() == 1
    assert (other.num_generated, waiting.num_generated) == (4, 0)
    assert bench.core.plan_step() == []
    late.ready = True
    bench.finish()
    assert waiting.tokens[5:] == [7, 7, 7]
    assert bench.core.is_idle


def test_preemption_does_not_break_a_structure(tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    runner = FakeRunner(num_blocks=6, vocab_size=320)
    compiler = StructureCompiler(tmp_path / "tokenizer.json", 320, frozenset({EOS}))
    structure = Structure(StructureKind.REGEX, "[a-z]{60,70}")

    def said(preempt_at: int) -> list[int]:
        core = EngineCore(runner.spec, 6, growth_tokens=0, constrain=compiler.constraint)
        sequence = core.admit_decode(make_spec([9, 8, 7], 40, structure=structure))
        assert isinstance(sequence, Sequence)
        core.run(sequence)
        while core.has_work:
            if sequence.num_generated == preempt_at:
                preempt_at = -1
                core._running.preempt(sequence)
            chunks = core.plan_step()
            core.finish_step(chunks, runner.execute(chunks))
        return sequence.tokens[3:]

    undisturbed = said(-1)
    assert len(undisturbed) > 20
    assert said(17) == undisturbed
    compiler.close()


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_sequence_without_numbers_ends_alone_and_leaves_no_kv_behind(hybrid: bool) -> None:
    bench = Bench()
    if hybrid:  # what is cached of states has other names
        bench.core.spec = replace(bench.core.spec, groups=KvGroups((0,), 1))
    told: dict[str, list[Emission]] = {"ill": [], "well": []}
    sequences = {}
    for name, seed in (("ill", 1), ("well", 2)):
        sequences[name] = bench.admit(prompt(40, seed), max_tokens=3)
        sequences[name].on_emission = told[name].append
        bench.core.run(sequences[name])
    bench.step()
    assert bench.core.pool.find(sequences["ill"].chain.hashes[0]) is not None
    chunks = bench.core.plan_step()
    result = bench.runner.execute(chunks)
    ill = [chunk.sequence_id for chunk in chunks].index(sequences["ill"].sequence_id)
    result.tokens[ill] = SampledToken(0, damaged=True)
    bench.core.finish_step(chunks, result)
    bench.core.check_integrity()
    bench.finish()
    last = told["ill"][-1]
    assert (last.damaged, last.finish_reason, last.position) == (True, FinishReason.ERROR, 41)
    assert [each.damaged for each in told["well"]] == [False] * 3
    hashes = sequences["ill"].chain.hashes
    assert all(bench.core.pool.find(each) is None for each in hashes), "others may not read it"
    assert bench.core.statistics().damaged_total == 1
    assert bench.core.is_idle


def test_an_adapter_that_is_not_loaded_is_refused() -> None:
    core = Bench().core
    spec = replace(make_spec(prompt(20), 4), adapter="sql")
    refusal = core.admit_decode(spec)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.message) == (
        *(RefusalReason.STALE, "the adapter sql is not loaded here"),
    )


@pytest.mark.parametrize(
    ("here", "wanted", "reason", "text"),
    [
        (None, 0, RefusalReason.STALE, "the engine fake computes no embeddings"),
        (EmbeddingSpec(8), 4, RefusalReason.INVALID, "4; this model allows 8"),
        (EmbeddingSpec(8, range(1, 8)), 9, RefusalReason.INVALID, "9; this model allows 1 to 8"),
        (EmbeddingSpec(8, (2, 4)), 3, RefusalReason.INVALID, "allows [2, 4, 8]"),
        (EmbeddingSpec(8, (2, 4)), 4, None, ""),
        (EmbeddingSpec(8), 8, None, ""),
        (EmbeddingSpec(8), 0, None, ""),
        (None, -1, None, ""),
    ],
)
def test_embeddings_that_cannot_be_computed_are_refused(
    here: EmbeddingSpec | None, wanted: int, reason: RefusalReason | None, text: str
) -> None:
    model = replace(FakeRunner().spec, embedding=here)
    core = EngineCore(model, 8, BatchLimits(), growth_tokens=0)
    found = core.admit_decode(replace(make_spec(prompt(20), 1), embedding=wanted))
    if reason is None:
        assert isinstance(found, Sequence)
        return
    assert isinstance(found, Refusal)
    assert found.reason is reason
    assert text in found.message
