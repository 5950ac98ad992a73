"""A very long prompt on two engines: memory besides KV stays small, and answers go on beside it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.long_prompt import forget_peak, status_mib
from benchmarks.random_llama import Shape, write_checkpoint
from kvmesh.core.types import SamplingParams
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.pair_share import pair_share
from kvmesh.engine.runner import TorchRunner
from kvmesh.policy.batching import BatchLimits
from kvmesh.policy.chain import MAX_PART_TOKENS, Cost, cut
from tests.integration.chained_engines import ChainedEngines

SHAPE = Shape("narrow", 128, 2, 2, 1, 512, head_dim=32, vocab=256)
"""What is inside of a layer would take 6 KB for each position."""

BLOCK = 16
STEP_TOKENS = 512
NUM_ANSWERED = 12
MOST_POSITION_BYTES = 3072
"""Between two layers: the residual stream, and queries, keys and values, 1.5 KB together. Another
1.5 KB are lost between what is kept."""

MOST_BESIDE_MIB = 48
"""For the pieces that are inside of a layer, and for what torch and Python keep."""


def engine(folder: Path, num_tokens: int) -> TorchRunner:
    """An engine with room for one prompt and an answer, all of which is in memory already."""
    runner = TorchRunner.load(
        folder,
        served_name=SHAPE.name,
        dtype="float32",
        num_blocks=num_tokens // BLOCK + 16,
        block_size=BLOCK,
    )
    runner.kv.tensor.zero_()
    return runner


@pytest.mark.parametrize(
    "num_tokens",
    [16_384, pytest.param(131_072, marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
def test_a_part_keeps_little_and_lets_answers_go_on(num_tokens: int, tmp_path: Path) -> None:
    folder = write_checkpoint(SHAPE, tmp_path / "model", 0)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = num_tokens + BLOCK
    (folder / "config.json").write_text(json.dumps(config))
    runners = [engine(folder, num_tokens) for _ in range(2)]
    cost = Cost(pair_share(load_model_config(folder)), 0.05, 64.0, SHAPE.layers)
    _, middle, _ = cut(cost, cost.head(0, num_tokens), num_tokens, 2, BLOCK)
    assert middle <= MAX_PART_TOKENS
    greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    answering = SamplingParams(temperature=0.0, max_tokens=NUM_ANSWERED, ignore_eos=True)
    chain = ChainedEngines(runners, BatchLimits(max_tokens=STEP_TOKENS))
    answers = chain.begin_answers(range(3, 40), answering)
    begun = [len(each) for each in chain.steps]
    prompt = [3 + position * 7919 % 251 for position in range(num_tokens)]
    forget_peak()
    before_mib = status_mib("VmRSS")
    found = chain.generate(prompt, [middle], greedy)
    peak_mib = status_mib("VmHWM") - before_mib
    assert peak_mib <= num_tokens * MOST_POSITION_BYTES / 2**20 + MOST_BESIDE_MIB
    alone = ChainedEngines(runners[:1], chain.limits)
    assert found == alone.generate(prompt, [], greedy)
    for first, steps, answer in zip(begun, chain.steps, answers, strict=True):
        assert len(answer) == NUM_ANSWERED
        answered = [at for at, is_part in enumerate(steps) if not is_part and at >= first]
        # The first token of an answer came before the part did.
        beside = steps[first : answered[NUM_ANSWERED - 2]]
        assert any(beside)
        assert (True, True) not in pairwise(beside), "an answer gets every second step"
    for runner in runners:
        runner.close()
