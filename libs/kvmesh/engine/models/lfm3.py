"""Layers of LFM3; see families/lfm3.py."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layers import DENSE_MLP, Mixer, MixerLayer, load_gated_mlp, load_mixer_layer
from kvmesh.engine.norm_orders import SandwichLayer
from kvmesh.engine.short_conv import load_short_conv
from kvmesh.engine.weights import LayerWeights


def _load_mixer(weights: LayerWeights, config: ModelConfig) -> Mixer:
    if config.is_linear(weights.layer):
        return load_short_conv(weights, config)
    attention = load_attention(weights, config)
    if not config.head_gate:
        return attention
    gate = weights.linear("self_attn.gate_proj.weight", config.num_heads, config.hidden_size)
    return replace(attention, gate=gate)


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer | SandwichLayer:
    """See `LoadLayer`."""
    hidden = config.hidden_size
    mlp = load_gated_mlp(weights, DENSE_MLP, hidden, config.intermediate_size)
    usual = load_mixer_layer(weights, config, _load_mixer(weights, config), mlp)
    if not config.part_norms:
        return usual
    return SandwichLayer(
        input_norm=usual.input_norm,
        mixer=usual.mixer,
        post_mixer_norm=weights.vector("post_operator_norm.weight", hidden),
        pre_mlp_norm=usual.post_norm,
        mlp=usual.mlp,
        post_mlp_norm=weights.vector("post_ffn_norm.weight", hidden),
        eps=config.rms_norm_eps,
    )
