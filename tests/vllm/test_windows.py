"""Models with sliding windows: their tokens are those of vLLM, which frees what a window passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, MistralConfig

from kvmesh.core.types import SamplingParams
from tests.engine_alone import generated
from tests.vllm.oracle import VOCAB_SIZE, VllmAlone, some_prompts
from tests.vllm_engine import load_vllm

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
WINDOW = 40
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "sliding_window": WINDOW,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention"] * 2
CONFIGS = {
    "gemma2": Gemma2Config(**SHAPE, layer_types=MIXED, query_pre_attn_scalar=32),
    "gemma3": Gemma3TextConfig(**SHAPE, layer_types=MIXED, query_pre_attn_scalar=32),
    "mistral": MistralConfig(**SHAPE),  # in every layer
}


def written(name: str, folder: Path) -> Path:
    """A tiny random checkpoint."""
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    auto.from_config(CONFIGS[name]).float().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_vllm_in_chunks_and_after_a_preemption(
    name: str, tmp_path: Path
) -> None:
    folder = written(name, tmp_path / name)
    prompts = some_prompts(10, 400, seed=12)
    expected = VllmAlone(folder, "float32").greedy(prompts, GREEDY.max_tokens)
    runner = load_vllm(folder, num_blocks=200, dtype="float32")
    assert generated(runner, prompts, GREEDY) == expected
    assert generated(runner, prompts, GREEDY, max_tokens=96, num_blocks=40) == expected
    runner.close()
