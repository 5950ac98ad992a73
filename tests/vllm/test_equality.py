"""Tokens under our scheduler are vLLM's own, whatever shares their steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.core.types import SamplingParams
from kvmesh.engine.protocol import ModelRunner
from tests.engine_alone import generated
from tests.mesh_processes import MODEL_FOLDER
from tests.vllm.oracle import VllmAlone, some_prompts
from tests.vllm_engine import load_vllm

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.9, seed=11, top_k=50, top_p=0.95, min_p=0.01, max_tokens=24, ignore_eos=True
)


@pytest.fixture(scope="module")
def alone() -> VllmAlone:
    """Before the runner, which changes what vLLM thinks of its backend."""
    return VllmAlone(MODEL_FOLDER, "float32")


@pytest.fixture(scope="module")
def runner(alone: VllmAlone) -> Iterator[ModelRunner]:
    made = load_vllm(MODEL_FOLDER, num_blocks=800, dtype="float32")
    yield made
    made.close()


def test_fifty_random_prompts_are_continued_as_by_vllm(
    alone: VllmAlone, runner: ModelRunner
) -> None:
    prompts = some_prompts(50, 1000)
    assert {len(prompt) for prompt in prompts} >= {1, 1000}
    assert generated(runner, prompts, GREEDY) == alone.greedy(prompts, GREEDY.max_tokens)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_chunks_preemptions_and_neighbours_do_not_show(
    runner: ModelRunner, sampling: SamplingParams
) -> None:
    prompts = some_prompts(12, 400, seed=2)
    single = [generated(runner, [prompt], sampling)[0] for prompt in prompts]
    assert generated(runner, prompts, sampling, max_tokens=96) == single
    assert generated(runner, prompts, sampling, num_blocks=40) == single


def test_a_stream_that_moves_goes_on_with_its_tokens(runner: ModelRunner) -> None:
    draw = random.Random(3)
    for prompt in some_prompts(8, 300, seed=3):
        (whole,) = generated(runner, [prompt], DRAWN)
        at = draw.randrange(1, len(whole))
        (rest,) = generated(runner, [prompt + whole[:at]], DRAWN)
        assert rest[: len(whole) - at] == whole[at:]


def test_seeds_differ(runner: ModelRunner, tmp_path: Path) -> None:
    (prompt,) = some_prompts(3, 40, seed=4)[1:2]
    other = SamplingParams(temperature=0.9, seed=12, max_tokens=24, ignore_eos=True)
    assert generated(runner, [prompt], DRAWN) != generated(runner, [prompt], other)
