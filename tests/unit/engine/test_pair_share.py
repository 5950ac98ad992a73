from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.random_llama import SHAPES, config_of
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.pair_share import pair_share
from tests.unit.engine.tiny_checkpoint import write_checkpoint


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    shape = config_of(SHAPES["110M"])
    return load_model_config(write_checkpoint(tmp_path / "llama", **shape))


def test_a_context_of_some_thousand_tokens_costs_what_all_matrices_cost(
    config: ModelConfig,
) -> None:
    weights = SHAPES["110M"].layer_weights
    assert pair_share(config) == pytest.approx(2 * 12 * 12 * 64 / weights)
    assert 3000 < 1 / pair_share(config) < 6000


def test_the_vocabulary_counts_for_nothing(config: ModelConfig) -> None:
    assert pair_share(replace(config, vocab_size=1)) == pair_share(config)


def test_layers_that_forget_cost_the_same_everywhere(config: ModelConfig) -> None:
    """Of twelve layers six have a window: half of the attention is left, on somewhat more work."""
    half = replace(config, windows=(512, 0) * 6)
    assert pair_share(half) < pair_share(config) / 2
    assert pair_share(half) > pair_share(config) / 2.5
    assert 0 < pair_share(replace(config, windows=(512,) * 12)) < 1e-6
