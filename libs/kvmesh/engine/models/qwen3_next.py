"""Layers of Qwen3-Next; see families/qwen3_next.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.experts import experts_or_dense, load_gate_shared
from kvmesh.engine.families.qwen3_next import NORM_OFFSET
from kvmesh.engine.gated_delta import load_gated_delta
from kvmesh.engine.layers import Mixer, MixerLayer, load_mixer_layer
from kvmesh.engine.linear_attention import DeltaAttention
from kvmesh.engine.weights import LayerWeights


def _by_kind(rows: Tensor, sizes: list[int]) -> Tensor:
    """Reorders [key heads, rows, columns] with interleaved kinds to all rows of each kind."""
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
    """Reads a layer with either kind of attention.

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


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    return load_hybrid_layer(weights, config, _load_delta)
