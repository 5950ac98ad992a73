"""Models with sliding windows: their tokens are those of vLLM, which frees what a window passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, MistralConfig

from kvmesh.core.types import SamplingParams
from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.engine.move_check import require_moves
from kvmesh.kv.groups import first_visible, num_blocks_of
from tests.e2e.api_client import ApiClient, placed
from tests.engine_alone import generated
from tests.mesh_processes import running_mesh
from tests.vllm.oracle import VOCAB_SIZE, VllmAlone, some_prompts
from tests.vllm.test_ranks import sent_by_request
from tests.vllm_engine import BLOCK_SIZE, load_vllm

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
WINDOW = 40
BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 2 * 32 * 4
"""Layers that a block has room for, KV heads, positions, key and value, bytes of a float32."""
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
WINDOWS = {"gemma2": (0, WINDOW), "gemma3": (0, WINDOW), "mistral": (WINDOW,)}


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
    assert runner.spec.groups.windows == WINDOWS[name]
    assert generated(runner, prompts, GREEDY) == expected
    assert generated(runner, prompts, GREEDY, max_tokens=96, num_blocks=40) == expected
    runner.close()
    on_device = load_vllm(folder, num_blocks=200, dtype="float32", on_devices=True)
    assert isinstance(on_device.kv, DeviceKvPool)
    require_moves(on_device, on_device.kv, 512)
    assert generated(on_device, prompts, GREEDY) == expected
    on_device.close()


async def test_a_handoff_moves_what_windows_see_and_not_more(tmp_path: Path) -> None:
    """The decode worker has two ranks."""
    folder = written("gemma3", tmp_path / "model")
    prompts = some_prompts(8, 400, seed=13)
    expected = VllmAlone(folder, "float32").greedy(prompts, GREEDY.max_tokens)
    engine = {"engine.model": folder, "engine.block-size": BLOCK_SIZE, "engine.num-blocks": 200}
    flags = {"prefill": engine, "decode": {**engine, "engine.tensor-parallel": 2}}
    async with (
        running_mesh(tmp_path, 1, 1, engine="vllm", flags=flags) as mesh,
        ApiClient(mesh.url) as client,
    ):
        for number, prompt in enumerate(prompts):
            answer = await client.complete(
                prompt,
                headers=placed("disaggregated") | {"x-request-id": f"number{number}"},
                temperature=0.0,
                max_tokens=GREEDY.max_tokens,
                ignore_eos=True,
            )
            assert answer.token_ids == expected[number], f"prompt {number}"
        await mesh.idle()
    sent = sent_by_request(mesh)
    for number, prompt in enumerate(prompts):
        # Two of the layers keep all positions; a block has room for two layers.
        whole = num_blocks_of(len(prompt), BLOCK_SIZE)
        in_window = whole - first_visible(WINDOW, len(prompt), BLOCK_SIZE)
        ((_, num_bytes),) = sent[f"number{number}"]
        assert num_bytes == (whole + in_window) * BLOCK_BYTES, f"prompt {number}"
