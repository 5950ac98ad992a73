"""Layers of GLM-4 and its second version; see families/glm.py."""

from __future__ import annotations

from torch import Tensor

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layers import MixerLayer, load_joined_mlp, load_mixer_layer
from kvmesh.engine.norm_orders import SandwichLayer
from kvmesh.engine.weights import LayerWeights


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    attention = load_attention(weights, config)
    return load_mixer_layer(weights, config, attention, load_joined_mlp(weights, config))


def load_sandwich_layer(weights: LayerWeights, config: ModelConfig) -> SandwichLayer:
    """See `LoadLayer`."""

    def norm(name: str) -> Tensor:
        return weights.vector(f"{name}_layernorm.weight", config.hidden_size)

    return SandwichLayer(
        input_norm=norm("input"),
        mixer=load_attention(weights, config),
        post_mixer_norm=norm("post_self_attn"),
        # Its name is that of older models' only second norm, at the same place.
        pre_mlp_norm=norm("post_attention"),
        mlp=load_joined_mlp(weights, config),
        post_mlp_norm=norm("post_mlp"),
        eps=config.rms_norm_eps,
    )
