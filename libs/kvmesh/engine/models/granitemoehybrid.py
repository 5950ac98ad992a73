"""Layers of Granite 4; see families/granitemoehybrid.py."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.experts import SharedMlp, load_softmax_routed
from kvmesh.engine.layers import Mixer, MixerLayer, Mlp, load_joined_mlp, load_mixer_layer
from kvmesh.engine.mamba import load_mamba
from kvmesh.engine.weights import LayerWeights


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    mixer: Mixer
    if config.is_linear(weights.layer):
        mixer = load_mamba(weights, config)
    else:
        mixer = load_attention(weights, config)
    return load_mixer_layer(weights, config, mixer, _load_mlp(weights, config))


def _load_mlp(weights: LayerWeights, config: ModelConfig) -> Mlp:
    moe = config.moe
    if moe is None:
        return load_joined_mlp(weights, config)
    chosen = load_softmax_routed(weights, config)
    if not moe.shared_size:
        return chosen
    common = load_joined_mlp(weights, replace(config, intermediate_size=moe.shared_size))
    return SharedMlp(chosen, common)
