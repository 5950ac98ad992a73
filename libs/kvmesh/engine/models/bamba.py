"""Layers of Bamba; see families/bamba.py."""

from __future__ import annotations

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layers import DENSE_MLP, Mixer, MixerLayer, load_gated_mlp, load_mixer_layer
from kvmesh.engine.mamba import load_mamba
from kvmesh.engine.weights import LayerWeights


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    mixer: Mixer
    if config.is_linear(weights.layer):
        mixer = load_mamba(weights, config)
    else:
        mixer = load_attention(weights, config)
    mlp = load_gated_mlp(weights, DENSE_MLP, config.hidden_size, config.intermediate_size)
    return load_mixer_layer(weights, config, mixer, mlp)
