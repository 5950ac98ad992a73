"""One decoder layer of the Llama family, and the rotary table its layers share.

Tests: tests/unit/engine/test_layers.py, tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import ModelConfig, RopeConfig
from kvmesh.engine.weights import WeightFiles
from kvmesh.kernels import reference
from kvmesh.kernels.dispatch import StepAttention


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosines and signed sines of every position.

    Attributes:
        cos: [positions, 1, head_dim] in the computation dtype.
        signed_sin: the same shape, first half negated, as `reference.apply_rope` wants it.
    """

    cos: Tensor
    signed_sin: Tensor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of a head's elements.

    Returns:
        [head_dim / 2] fp32, descending.

    Source: arXiv 2104.09864 §3.2; "llama3" as published with the Llama 3.1 weights.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind != "llama3":
        return frequencies
    # Waves shorter than the original context stay, longer ones stretch, those between are mixed.
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_positions / wavelengths
    spread = rope.high_freq_factor - rope.low_freq_factor
    keep = ((turns - rope.low_freq_factor) / spread).clamp(0, 1)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def rope_table(
    rope: RopeConfig, head_dim: int, num_positions: int, dtype: torch.dtype, device: str
) -> RopeTable:
    """The table for positions below `num_positions`; angles are computed in fp32."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos(), angles.sin()
    return RopeTable(
        torch.cat([cos, cos], dim=-1).to(device, dtype)[:, None],
        torch.cat([-sin, sin], dim=-1).to(device, dtype)[:, None],
    )


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; projections with the same input are one matrix.

    Attributes:
        qkv: [(heads + 2 * kv_heads) * head_dim, hidden], rows of q, then k, then v.
        qk_norm: [heads + kv_heads, head_dim] or None.
        gate_up: [2 * intermediate, hidden].
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


def load_layer(
    files: WeightFiles, config: ModelConfig, layer: int, dtype: torch.dtype, device: str
) -> LayerWeights:
    """Reads one layer by its Hugging Face names.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    prefix = f"model.layers.{layer}"
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    sizes = (("q", q_rows), ("k", kv_rows), ("v", kv_rows))

    def stacked(parts: list[tuple[str, int]], columns: int | None) -> Tensor:
        names = [(f"{prefix}.{name}", count) for name, count in parts]
        return files.read_rows(names, columns, dtype, device)

    def qkv(kind: str, columns: int | None) -> Tensor:
        parts = [(f"self_attn.{name}_proj.{kind}", rows) for name, rows in sizes]
        return stacked(parts, columns)

    qk_norm = None
    if config.qk_norm:
        q_norm = stacked([("self_attn.q_norm.weight", head_dim)], None)
        k_norm = stacked([("self_attn.k_norm.weight", head_dim)], None)
        qk_norm = torch.cat(
            [q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)]
        )
    return LayerWeights(
        input_norm=stacked([("input_layernorm.weight", hidden)], None),
        qkv=qkv("weight", hidden),
        qkv_bias=qkv("bias", None) if config.qkv_bias else None,
        qk_norm=qk_norm,
        output=stacked([("self_attn.o_proj.weight", hidden)], q_rows),
        output_bias=(
            stacked([("self_attn.o_proj.bias", hidden)], None) if config.output_bias else None
        ),
        post_norm=stacked([("post_attention_layernorm.weight", hidden)], None),
        gate_up=stacked(
            [
                ("mlp.gate_proj.weight", config.intermediate_size),
                ("mlp.up_proj.weight", config.intermediate_size),
            ],
            hidden,
        ),
        down=stacked([("mlp.down_proj.weight", hidden)], config.intermediate_size),
    )


def run_layer(
    weights: LayerWeights,
    config: ModelConfig,
    layer: int,
    x: Tensor,
    rope: RopeTable,
    attention: StepAttention,
) -> None:
    """Runs one layer over the rows of a step.

    Args:
        x: [rows, hidden] residual stream, changed in place.
        rope: gathered for the rows' positions.
        attention: of this step; writes the rows' keys and values.
    """
    rows, eps = len(x), config.rms_norm_eps
    num_qk = config.num_heads + config.num_kv_heads
    h = reference.rms_norm(x, weights.input_norm, eps)
    qkv = functional.linear(h, weights.qkv, weights.qkv_bias).view(rows, -1, config.head_dim)
    # Queries and keys take the same norm and rotation: as one tensor they cost one call each.
    qk, v = qkv[:, :num_qk], qkv[:, num_qk:]
    if weights.qk_norm is not None:
        qk = reference.rms_norm(qk, weights.qk_norm, eps)
    qk = reference.apply_rope(qk, rope.cos, rope.signed_sin)
    out = attention.run(qk[:, : config.num_heads], qk[:, config.num_heads :], v, layer)
    x += functional.linear(out.view(rows, -1), weights.output, weights.output_bias)
    h = reference.rms_norm(x, weights.post_norm, eps)
    gate_up = functional.linear(h, weights.gate_up)
    x += functional.linear(reference.silu_and_mul(gate_up), weights.down)
