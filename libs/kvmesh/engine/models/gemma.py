"""Layers of Gemma; see families/gemma.py."""

from __future__ import annotations

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.gemma import NORM_OFFSET
from kvmesh.engine.layers import DENSE_MLP, MixerLayer, load_gated_mlp, load_mixer_layer
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import reference


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    shape = config.hidden_size, config.intermediate_size
    mlp = load_gated_mlp(weights, DENSE_MLP, *shape, reference.gelu_and_mul)
    attention = load_attention(weights, config)
    return load_mixer_layer(weights, config, attention, mlp, norm_offset=NORM_OFFSET)
