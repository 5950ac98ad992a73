"""A prompt whose prefix stays on another worker: the tokens of computing all of it here."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvmesh.core.types import SamplingParams, SequenceSpec
from kvmesh.engine.runner import TorchRunner
from kvmesh.kv.hashing import root_hash
from tests.integration.families import random_model
from tests.integration.family_configs import CONFIGS
from tests.remote_prefix import BLOCK, TinyEngine, generated
from tests.unit.engine.tiny_checkpoint import write_checkpoint

PROMPT = [random.Random(1).randrange(3, 64) for _ in range(43)]
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=9, ignore_eos=True),
]
NUM_LAYERS = 2


def spec_of(tokens: list[int], sampling: SamplingParams = SAMPLINGS[0]) -> SequenceSpec:
    return SequenceSpec(tuple(tokens), len(tokens), sampling, root_hash("test"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engines(folder: Path) -> Iterator[tuple[TinyEngine, TinyEngine]]:
    holder, asker = TinyEngine(folder), TinyEngine(folder)
    yield holder, asker
    assert asker.core.is_idle, "blocks or sequences are left"
    holder.close()
    asker.close()


def test_static_decode_steps_leave_out_who_asks(engines: tuple[TinyEngine, TinyEngine]) -> None:
    holder, asker = engines
    asker.runner.use_static_steps(4)
    spec = spec_of(PROMPT)
    sequence = asker.admit(spec)
    asker.behind(sequence, 10, holder.hold(spec))
    asker.run(sequence)
    assert generated(sequence) == holder.generate(spec)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_blocks", [1, 5, 10])
def test_tokens_are_those_of_computing_all_of_it(
    engines: tuple[TinyEngine, TinyEngine], num_blocks: int, sampling: SamplingParams
) -> None:
    """With one block elsewhere the rest takes chunks; with ten it is three tokens."""
    holder, asker = engines
    spec = spec_of(PROMPT, sampling)
    remote = holder.hold(spec)
    sequence = asker.admit(spec)
    held_before = asker.core.pool.num_free
    asker.behind(sequence, num_blocks, remote)
    assert asker.core.pool.num_free == held_before + num_blocks, "no room for what is elsewhere"
    assert sequence.num_cached == num_blocks * BLOCK
    asker.run(sequence)
    assert generated(sequence) == holder.generate(spec)
    steps = -(-(len(PROMPT) - num_blocks * BLOCK) // 8) + 8  # chunks, then each token but the last
    assert remote.layers == [*range(NUM_LAYERS)] * steps, "decode steps ask as well"


def test_what_is_here_already_is_not_asked_for(engines: tuple[TinyEngine, TinyEngine]) -> None:
    holder, asker = engines
    asker.generate(spec_of(PROMPT[:20]))
    remote = holder.hold(spec_of(PROMPT))
    sequence = asker.admit(spec_of(PROMPT))
    assert sequence.num_cached == 5 * BLOCK
    asker.behind(sequence, 10, remote)
    assert len(remote.blocks) == 5
    asker.run(sequence)
    assert generated(sequence) == holder.generate(spec_of(PROMPT))


def test_others_in_the_same_steps_get_their_own_tokens(
    engines: tuple[TinyEngine, TinyEngine],
) -> None:
    holder, asker = engines
    specs = [spec_of(PROMPT[::-1]), spec_of(PROMPT), spec_of(PROMPT[5:12], SAMPLINGS[1])]
    expected = [holder.generate(spec) for spec in specs]
    remote = holder.hold(specs[1])
    sequences = [asker.admit(spec) for spec in specs]
    asker.behind(sequences[1], 10, remote)
    asker.run(*sequences)
    assert [generated(sequence) for sequence in sequences] == expected


@pytest.mark.parametrize("dies_after", [0, 1, 2, 3, 11])
def test_a_lost_holder_costs_time_and_no_token(
    engines: tuple[TinyEngine, TinyEngine], dies_after: int
) -> None:
    """In the first layer, in the second, in the second chunk, and between decode steps."""
    holder, asker = engines
    spec = spec_of(PROMPT, SAMPLINGS[1])
    other = spec_of(PROMPT[7:20])
    remote = holder.hold(spec, dies_after=dies_after)
    sequence, beside = asker.admit(spec), asker.admit(other)
    asker.behind(sequence, 7, remote)
    asker.run(sequence, beside)
    assert generated(sequence) == holder.generate(spec)
    assert generated(beside) == holder.generate(other)
    assert len(remote.layers) in {dies_after + 1, dies_after + 2}, "nobody asks the dead"
    assert sequence.remote is None
    positions = [emission.position for emission in asker.told]
    assert sorted(positions) == sorted([*range(43, 52), *range(13, 22)]), "each token once"


def test_a_release_in_the_middle_leaves_nothing(engines: tuple[TinyEngine, TinyEngine]) -> None:
    holder, asker = engines
    spec = spec_of(PROMPT)
    sequence = asker.admit(spec)
    asker.behind(sequence, 3, holder.hold(spec))
    asker.core.run(sequence)
    asker.step()
    asker.core.release(sequence)
    assert asker.core.is_idle


def test_blocks_behind_a_hole_are_found_by_nobody(
    engines: tuple[TinyEngine, TinyEngine],
) -> None:
    holder, asker = engines
    spec = spec_of(PROMPT)
    sequence = asker.admit(spec)
    asker.behind(sequence, 3, holder.hold(spec))
    asker.run(sequence)
    assert asker.core.pool.held_hashes() == []


def test_a_preempted_sequence_computes_its_prefix(folder: Path) -> None:
    holder, asker = TinyEngine(folder), TinyEngine(folder, num_blocks=20)
    specs = [spec_of(PROMPT[3:30]), spec_of(PROMPT)]
    long = [
        dataclasses.replace(
            spec, sampling=dataclasses.replace(spec.sampling, max_tokens=30, ignore_eos=True)
        )
        for spec in specs
    ]
    expected = [holder.generate(spec) for spec in long]
    remote = holder.hold(long[1])
    older, younger = asker.admit(long[0]), asker.admit(long[1])
    asker.behind(younger, 9, remote)
    asker.run(older, younger)
    assert [generated(older), generated(younger)] == expected
    assert asker.core.statistics().preemptions_total > 0
    assert younger.remote is None
    assert asker.core.is_idle
    holder.close()
    asker.close()


PARTED = [
    "qwen3-untied",
    "smollm3",
    "olmo2",
    "glm4",
    "cohere",
    "ministral3",
    "gpt-neox",
    "nemotron",
]


@pytest.mark.parametrize("family", PARTED)
def test_families_whose_attention_is_parted(family: str, tmp_path: Path) -> None:
    random_model(CONFIGS[family]).save_pretrained(tmp_path)
    holder, asker = TinyEngine(tmp_path), TinyEngine(tmp_path)
    spec = spec_of(PROMPT)
    sequence = asker.admit(spec)
    asker.behind(sequence, 7, holder.hold(spec))
    asker.run(sequence)
    assert generated(sequence) == holder.generate(spec)
    holder.close()
    asker.close()


@pytest.mark.parametrize("family", ["mistral-window", "deepseek-v3", "exaone4", "minimax", "lfm2"])
def test_families_whose_attention_cannot_be_parted(family: str, tmp_path: Path) -> None:
    random_model(CONFIGS[family]).save_pretrained(tmp_path)
    runner = TorchRunner.load(tmp_path, served_name="m", num_blocks=4)
    assert runner.partial_attention is None
    runner.close()


def test_answers_are_bytes_of_the_pools_dtype(folder: Path) -> None:
    runner = TorchRunner.load(folder, served_name="m", num_blocks=4, dtype="bfloat16")
    runner.kv.tensor.normal_()
    partial = runner.partial_attention
    assert partial is not None
    q = torch.randn(3, 4, 8).to(torch.bfloat16)
    output, lse = partial.attend(1, [2, 0], q.view(torch.uint8).numpy().data.cast("B"), 0.5)
    assert (output.nbytes, lse.nbytes) == (3 * 4 * 8 * 2, 3 * 4 * 4)
    runner.close()
