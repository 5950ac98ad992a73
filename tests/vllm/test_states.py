"""Models with layers of state: their tokens are those of vLLM, and states move with the blocks.

vLLM's kernels for these layers on a CPU are for bfloat16. There a token may depend on the steps
that a prompt was computed in, so what is compared here has equal steps.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig, Qwen3NextConfig

from kvmesh.core.errors import ConfigError
from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import SamplingParams
from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.engine.move_check import require_moves
from kvmesh.engine.protocol import SequenceChunk, StateChunk
from kvmesh.kv.groups import num_blocks_of
from tests.e2e.api_client import ApiClient, placed
from tests.engine_alone import generated
from tests.mesh_processes import MODEL_FOLDER, running_mesh
from tests.vllm.oracle import VOCAB_SIZE, VllmAlone, some_prompts
from tests.vllm.test_ranks import sent_by_request
from tests.vllm_engine import load_vllm

if TYPE_CHECKING:
    from kvmesh.engine.vllm_runner import VllmRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
DTYPE = "bfloat16"
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS = {
    "mamba2": GraniteMoeHybridConfig(
        **SHAPE,
        layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_expand=2,
        num_local_experts=0,
        shared_intermediate_size=96,
    ),
    "gated_delta_net": Qwen3NextConfig(
        **SHAPE,
        head_dim=64,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        decoder_sparse_step=1,
    ),
}
BLOCK_SIZES = {"mamba2": 96, "gated_delta_net": 544}
"""vLLM chooses them: a block of keys and values has as many bytes as a state."""
HEAD_DIMS = {"mamba2": 32, "gated_delta_net": 64}
MAX_TOKENS = 4096
"""All prompts are computed in one step."""


def test_steps_end_where_states_are_saved() -> None:
    from kvmesh.engine.vllm_runner import cut_at_saves

    state = StateChunk([5], [6], [(64, [7]), (64, [8]), (90, [9])])
    whole = SequenceChunk(1, [0] * 100, 10, 100, [0, 1], 100, GREEDY, sample=True, state=state)
    parts = cut_at_saves(whole)
    assert [(each.start, each.end, each.sample) for each in parts] == [
        (10, 64, False),
        (64, 90, False),
        (90, 100, True),
    ]
    assert [each.state for each in parts] == [
        StateChunk([5], [6], [(64, [7]), (64, [8])]),
        StateChunk([5], [5], [(90, [9])]),
        StateChunk([5], [5], []),
    ]
    assert cut_at_saves(replace(whole, state=None))[0].end == 100


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint, in a folder of its name, with the embedded model's vocabulary."""
    folder: Path = tmp_path_factory.mktemp("states") / request.param
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    auto.from_config(CONFIGS[request.param]).bfloat16().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(MODEL_FOLDER / name, folder)
    return folder


def test_tokens_are_those_of_vllm_also_on_a_device(model: Path) -> None:
    prompts = some_prompts(10, 400, seed=12)
    alone = VllmAlone(model, DTYPE, enable_prefix_caching=False)
    expected = [alone.greedy([prompt], GREEDY.max_tokens)[0] for prompt in prompts]
    for on_devices in (False, True):
        runner = load_vllm(
            model,
            num_blocks=200,
            block_size=BLOCK_SIZES[model.name],
            dtype=DTYPE,
            max_tokens=MAX_TOKENS,
            on_devices=on_devices,
        )
        assert runner.spec.groups == KvGroups((0,), state_blocks=1)
        if isinstance(runner.kv, DeviceKvPool):
            require_moves(runner, runner.kv, MAX_TOKENS)
        assert generated(runner, prompts, GREEDY, max_tokens=MAX_TOKENS) == expected
        # Kernels of gated delta net do not repeat their results exactly in other steps.
        check_scores(runner, are_equal=model.name == "mamba2")
        # One after the other, so that each sequence has the first blocks, of which vLLM keeps one.
        assert [generated(runner, [each], GREEDY)[0] for each in prompts] == expected
        runner.close()


def test_other_block_sizes_are_refused(model: Path) -> None:
    size = BLOCK_SIZES[model.name]
    with pytest.raises(ConfigError, match=f"does not fit this model in vLLM: set {size}"):
        load_vllm(model, num_blocks=50, dtype=DTYPE)


def check_scores(runner: VllmRunner, *, are_equal: bool) -> None:
    """Scores of a prompt do not show where its state is saved."""
    size = runner.spec.layout.block_size
    prompt = list(range(5, 2 * size + 100))
    scored = SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=1)
    found = []
    for number, saves in enumerate(([], [(size, [4]), (2 * size, [5])])):
        inside = [each for each in saves if each[0] < len(prompt)]
        chunk = SequenceChunk(
            number,
            prompt,
            0,
            len(prompt),
            range(10, 10 + num_blocks_of(len(prompt), size)),
            len(prompt),
            scored,
            sample=True,
            state=StateChunk([0], [], inside),
            score_prompt=True,
        )
        result = runner.execute([chunk])
        found.append([each.logprob for each in result.prompt_logprobs[0]])
        runner.forget([number])
    assert [len(each) for each in found] == [len(prompt) - 1] * 2
    assert found[0] == pytest.approx(found[1], abs=0 if are_equal else 2.0)


async def test_states_are_handed_off_and_prefixes_resume_from_them(
    model: Path, tmp_path: Path
) -> None:
    size = BLOCK_SIZES[model.name]
    engine = engine_of(model)
    flags = {"prefill": engine, "decode": engine}
    prompts = [each for each in some_prompts(12, 900, seed=13) if len(each) > 96][:4]
    # A state is saved after the first block, so the step ends there.
    limits = {"max_num_batched_tokens": size, "max_num_seqs": 16}
    alone = VllmAlone(model, DTYPE, enable_prefix_caching=False, **limits)
    expected = [alone.greedy([prompt], GREEDY.max_tokens)[0] for prompt in prompts]
    async with (
        running_mesh(tmp_path, 1, 1, engine="vllm", flags=flags) as mesh,
        ApiClient(mesh.url) as client,
    ):

        async def ask(name: str, prompt: list[int], placement: str) -> tuple[list[int], int]:
            answer = await client.complete(
                prompt,
                headers=placed(placement) | {"x-request-id": name},
                temperature=0.0,
                max_tokens=GREEDY.max_tokens,
                ignore_eos=True,
            )
            assert answer.ok, answer.error
            return answer.token_ids, answer.cached_tokens

        for number, prompt in enumerate(prompts):
            tokens, _ = await ask(f"number{number}", prompt, "disaggregated")
            assert tokens == expected[number], f"prompt {number}"
        longest = max(prompts, key=len)
        again = [await ask(f"again{turn}", longest, "disaggregated") for turn in range(2)]
        assert again[0][1] == (len(longest) - 1) // size * size > 0
        assert again[0] == again[1]
        at_once = [ask(f"more{turn}", longest, "aggregated") for turn in range(4)]
        assert {cached for _, cached in await asyncio.gather(*at_once)} == {again[0][1]}
        await mesh.idle()
    sent = sent_by_request(mesh)
    block_bytes = 2 * 2 * size * 2 * HEAD_DIMS[model.name] * 2
    for number, prompt in enumerate(prompts):
        ((_, num_bytes),) = sent[f"number{number}"]
        num_blocks = num_blocks_of(len(prompt), size) + 1  # one of them has the state
        assert num_bytes == num_blocks * block_bytes, f"prompt {number}"


async def test_ranks_have_parts_of_states(model: Path, tmp_path: Path) -> None:
    """Tokens are those of two ranks of vLLM alone."""
    prompts = some_prompts(6, 400, seed=14)
    alone = VllmAlone(model, DTYPE, enable_prefix_caching=False, tensor_parallel_size=2)
    expected = [alone.greedy([prompt], GREEDY.max_tokens)[0] for prompt in prompts]
    engine = engine_of(model) | {"engine.tensor-parallel": 2}
    async with (
        running_mesh(
            tmp_path, 1, 1, engine="vllm", flags={"prefill": engine, "decode": engine}
        ) as mesh,
        ApiClient(mesh.url) as client,
    ):
        for placement in ("disaggregated", "aggregated"):
            for number, prompt in enumerate(prompts):
                answer = await client.complete(
                    prompt, headers=placed(placement), max_tokens=16, ignore_eos=True
                )
                assert answer.token_ids == expected[number], (placement, number)
        await mesh.idle()


def engine_of(model: Path) -> dict[str, Any]:
    """Flags of a worker."""
    return {
        "engine.model": model,
        "engine.dtype": DTYPE,
        "engine.block-size": BLOCK_SIZES[model.name],
        "engine.num-blocks": 100,
        "engine.max-batch-tokens": MAX_TOKENS,
    }
