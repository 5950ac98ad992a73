"""Layers of Qwen3.5; see families/qwen3_5.py."""

from __future__ import annotations

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.gated_delta import load_gated_delta
from kvmesh.engine.layers import MixerLayer
from kvmesh.engine.linear_attention import DeltaAttention
from kvmesh.engine.models.qwen3_next import load_hybrid_layer
from kvmesh.engine.weights import LayerWeights


def _load_delta(weights: LayerWeights, config: ModelConfig) -> DeltaAttention:
    shape, hidden = config.linear, config.hidden_size
    assert shape is not None
    heads = shape.num_value_heads
    main = [
        ("linear_attn.in_proj_qkv.weight", shape.conv_channels),
        ("linear_attn.in_proj_z.weight", heads * shape.value_dim),
    ]
    rates = [("linear_attn.in_proj_b.weight", heads), ("linear_attn.in_proj_a.weight", heads)]
    return load_gated_delta(
        weights, config, weights.stacked(main, hidden), weights.stacked(rates, hidden)
    )


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    return load_hybrid_layer(weights, config, _load_delta)
