"""Whole steps on a device that is not there: nothing in them waits for what a tensor holds, and
every launch is one that CUDA takes, with a pool as large as an H200's. Run by
test_triton_kernels.py in a process of its own, without the interpreter.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kvmesh.core.types import SamplingParams
from kvmesh.engine import runner as runner_module
from kvmesh.engine.checkpoint import parse_model_config
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.kv_plan import kv_layout, plan_kv
from kvmesh.engine.kv_shape import PoolTensor
from kvmesh.engine.model import load_model
from kvmesh.engine.protocol import ModelSpec, SampledToken, SequenceChunk, StateChunk
from kvmesh.engine.runner import TorchRunner
from kvmesh.engine.sampler import choose
from kvmesh.engine.static_inputs import InputShape, StaticInputs
from kvmesh.engine.static_step import StaticStep
from tests.unit.kernels.no_device import device

POOL_BYTES = 120 << 30
MAX_BATCH = 64
COMMON: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "vocab_size": 32_000,
    "max_position_embeddings": 32_768,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": COMMON | {"model_type": "llama"},
    "qwen3_moe": COMMON
    | {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3_next": COMMON
    | {
        "model_type": "qwen3_next",
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek_v3": COMMON
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 16,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "scoring_func": "sigmoid",
    },
}
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_p=0.9, top_k=50, num_logprobs=3),
    SamplingParams(seed=3, min_p=0.1, presence_penalty=0.5),
)


class _AnyWeights:
    """Files that hold whatever is asked for, experts one by one."""

    def has(self, name: str) -> bool:
        return not name.endswith("gate_up_proj")

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def read_rows(
        self, parts: list[tuple[str, int]], columns: int | None, dtype: torch.dtype, device: str
    ) -> Tensor:
        tail = () if columns is None else (columns,)
        return torch.empty((sum(rows for _, rows in parts), *tail), dtype=dtype, device=device)


class _Pool(PoolTensor):
    def computed(self) -> None: ...


def _runner(config: ModelConfig) -> tuple[TorchRunner, StaticStep]:
    """A model of random proportions over a pool that fills the device, and its static step."""
    plan = plan_kv(config, "bfloat16", 16)
    layout = kv_layout(config, plan, dtype="bfloat16", fingerprint="")
    blocks = POOL_BYTES // layout.block_bytes
    memory = torch.empty(
        (blocks + 1) * layout.block_bytes // 2, dtype=torch.bfloat16, device="meta"
    )
    assert memory.numel() > 1 << 35
    files: Any = _AnyWeights()
    model = load_model(
        files, config, plan, num_positions=32_768, dtype=torch.bfloat16, device="meta"
    )
    spec = ModelSpec("m", config.vocab_size, 32_768, frozenset(), layout, plan.groups)
    pool: Any = _Pool(layout, blocks, memory)
    shape = InputShape(MAX_BATCH, 32_768, plan.block_size, plan.groups, blocks)
    inputs = StaticInputs(shape, "meta")
    latent_layers = plan.block_layers if config.latent is not None else 0
    step = StaticStep(model, inputs, pool.with_spare, latent_layers)
    return TorchRunner(spec, model, plan, pool, "meta"), step


def _chunk(runner: TorchRunner, number: int, start: int, end: int) -> SequenceChunk:
    groups = runner.spec.groups
    table = list(range(-(-end // runner.spec.layout.block_size)))
    blocks = list(range(groups.state_blocks))
    return SequenceChunk(
        number,
        range(3, 3 + end),
        start,
        end,
        table,
        end,
        PARAMS[number % len(PARAMS)],
        sample=True,
        more_tables=[table] * (len(groups.windows) - 1),
        state=StateChunk(blocks, blocks if start else []) if blocks else None,
    )


def _unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
    """Host memory that is not pinned, which there must be a device for."""
    del pin_memory
    return torch.empty(*args, **kwargs)


def _chosen(logits: Tensor, chunks: list[SequenceChunk]) -> list[SampledToken]:
    """All of sampling but the reading of what was chosen, which has to wait."""
    choose(logits, chunks)
    return [SampledToken(0)] * len(chunks)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_steps(name: str) -> None:
    config = parse_model_config(CONFIGS[name], {}, origin=name)
    with (
        device(90) as launches,
        patch.object(torch, "zeros", _unpinned),
        patch.object(torch.cuda, "Event", lambda: None),
        patch.object(runner_module, "sample", _chosen),
        patch.object(runner_module, "_current", lambda _: nullcontext()),
    ):
        runner, step = _runner(config)
        for bucket in (MAX_BATCH, 1):
            step.compute(bucket)
        decode = [_chunk(runner, n, 1000 * n + 40, 1000 * n + 41) for n in range(4)]
        runner.execute([*decode, _chunk(runner, 4, 0, 2048), _chunk(runner, 5, 1024, 1500)])
    kernels = {each.kernel for each in launches}
    assert {"_add_rms_norm_kernel", "_draw_kernel"} <= kernels
    assert ("_latent_decode_kernel" in kernels) == (config.latent is not None)
    assert ("_prefill_kernel" in kernels) == (config.latent is None)
    assert ("_grouped_kernel" in kernels) == (config.moe is not None)
    assert ("_scan_kernel" in kernels) == (name == "qwen3_next")
