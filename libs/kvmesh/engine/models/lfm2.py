"""Layers of LFM2; see families/lfm2.py."""

from __future__ import annotations

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.experts import W1_W3_W2, GroupRoute, experts_or_dense, load_routed
from kvmesh.engine.layers import Mixer, MixerLayer, Mlp, load_mixer_layer
from kvmesh.engine.short_conv import load_short_conv
from kvmesh.engine.weights import LayerWeights


def _load_experts(weights: LayerWeights, config: ModelConfig) -> Mlp:
    moe = config.moe
    assert moe is not None
    bias = weights.exact("mlp.expert_bias", (moe.num_experts,)) if moe.biased_choice else None
    route = GroupRoute(moe.top_k, 1, 1, moe.normalize, moe.scale, bias)
    return load_routed(weights, config, route, names=W1_W3_W2)


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    mixer: Mixer
    if config.is_linear(weights.layer):
        mixer = load_short_conv(weights, config)
    else:
        mixer = load_attention(weights, config)
    return load_mixer_layer(
        weights, config, mixer, experts_or_dense(weights, config, _load_experts)
    )
