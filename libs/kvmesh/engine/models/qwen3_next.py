"""Qwen3-Next: gated delta rule in most layers, gated attention in the others, shared experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.experts import experts_or_dense, load_gate_shared
from kvmesh.engine.gated_delta import gated_delta_shape, load_gated_delta
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import Mixer, MixerLayer, load_mixer_layer
from kvmesh.engine.linear_attention import DeltaAttention
from kvmesh.engine.models.family import Family, qwen_sparse_layers
from kvmesh.engine.rope_fields import rotary_dim
from kvmesh.engine.weights import LayerWeights

# Weights of norms are stored as their difference from one, but for that of the delta rule.
NORM_OFFSET = 1.0


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("attention_bias", False)
    moe = MoeConfig(
        num_experts=fields.number("num_experts", int, default=512),
        top_k=fields.number("num_experts_per_tok", int, default=10),
        intermediate_size=fields.number("moe_intermediate_size", int, default=512),
        normalize=fields.flag("norm_topk_prob", default=True),
        sparse_layers=qwen_sparse_layers(fields, config),
        shared_size=fields.number("shared_expert_intermediate_size", int, default=512),
    )
    return replace(
        config,
        qk_norm=True,
        rotary_dim=rotary_dim(fields, config.head_dim, default=0.25),
        linear=gated_delta_shape(fields, config.num_layers),
        moe=moe,
    )


def _by_kind(rows: Tensor, sizes: list[int]) -> Tensor:
    """Rows that take turns by key head, [key heads, rows, columns], to all of a kind together."""
    return torch.cat([part.flatten(0, 1) for part in torch.split(rows, sizes, dim=1)])


def _load_delta(weights: LayerWeights, config: ModelConfig) -> DeltaAttention:
    shape, hidden = config.linear, config.hidden_size
    assert shape is not None
    values = shape.num_value_heads // shape.num_key_heads
    per_head = [shape.key_dim, shape.key_dim, values * shape.value_dim, values * shape.value_dim]
    count = shape.num_key_heads
    main = weights.tensor("linear_attn.in_proj_qkvz.weight", (count * sum(per_head), hidden))
    rates = weights.tensor("linear_attn.in_proj_ba.weight", (2 * shape.num_value_heads, hidden))
    return load_gated_delta(
        weights,
        config,
        _by_kind(main.view(count, -1, hidden), per_head),
        _by_kind(rates.view(count, -1, hidden), [values, values]),
    )


def load_hybrid_layer(
    weights: LayerWeights,
    config: ModelConfig,
    load_delta: Callable[[LayerWeights, ModelConfig], DeltaAttention],
) -> MixerLayer:
    """Reads a layer of either kind of attention.

    Args:
        load_delta: reads the delta rule, whose projections families lay out differently.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    mixer: Mixer
    if config.is_linear(weights.layer):
        mixer = load_delta(weights, config)
    else:
        mixer = load_attention(weights, config, norm_offset=NORM_OFFSET, gated=True)
    mlp = experts_or_dense(weights, config, load_gate_shared)
    return load_mixer_layer(weights, config, mixer, mlp, norm_offset=NORM_OFFSET)


FAMILY = Family(
    _configure,
    partial(load_hybrid_layer, load_delta=_load_delta),
    {"head_dim": 256},
    norm_offset=NORM_OFFSET,
)
