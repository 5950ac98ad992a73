"""GLM-4 and its second version, GLM-4-0414: half of each head is rotated, pairs being neighbours;
0414 has norms on both sides of each part.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import MixerLayer, load_joined_mlp, load_mixer_layer
from kvmesh.engine.models.family import Family
from kvmesh.engine.norm_orders import SandwichLayer
from kvmesh.engine.rope_fields import rotary_dim
from kvmesh.engine.weights import LayerWeights


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        output_bias=False,
        rotary_dim=rotary_dim(fields, config.head_dim, default=0.5),
        interleaved=True,
    )


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    attention = load_attention(weights, config)
    return load_mixer_layer(weights, config, attention, load_joined_mlp(weights, config))


def _load_sandwich(weights: LayerWeights, config: ModelConfig) -> SandwichLayer:
    def norm(name: str) -> Tensor:
        return weights.vector(f"{name}_layernorm.weight", config.hidden_size)

    return SandwichLayer(
        input_norm=norm("input"),
        mixer=load_attention(weights, config),
        post_mixer_norm=norm("post_self_attn"),
        # Its name is that of older models, where it stands in the same place.
        pre_mlp_norm=norm("post_attention"),
        mlp=load_joined_mlp(weights, config),
        post_mlp_norm=norm("post_mlp"),
        eps=config.rms_norm_eps,
    )


_DEFAULTS = {"attention_bias": True, "head_dim": 128, "rms_norm_eps": 1.5625e-7}
GLM = Family(_configure, _load_layer, _DEFAULTS)
GLM4 = Family(_configure, _load_sandwich, _DEFAULTS)
