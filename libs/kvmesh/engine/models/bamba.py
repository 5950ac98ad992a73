"""Bamba: Mamba-2 in most layers, attention with rotation of half a head in those that the file
names.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import DENSE_MLP, Mixer, MixerLayer, load_gated_mlp, load_mixer_layer
from kvmesh.engine.mamba import load_mamba
from kvmesh.engine.models.family import Family
from kvmesh.engine.models.mamba_fields import mamba_shape
from kvmesh.engine.rope_fields import rotary_dim
from kvmesh.engine.weights import LayerWeights


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    every = frozenset(range(config.num_layers))
    layers = every.difference(fields.numbers("attn_layer_indices"))
    if layers == every:
        raise CheckpointError(f"{fields.origin}: attn_layer_indices without a layer of the model")
    values = fields.number("mamba_expand", int, default=2) * config.hidden_size
    return replace(
        config,
        rotary_dim=rotary_dim(fields, config.head_dim, default=0.5),
        linear=mamba_shape(fields, layers, values) if layers else None,
        state_norm_eps=config.rms_norm_eps,
    )


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    mixer: Mixer
    if config.is_linear(weights.layer):
        mixer = load_mamba(weights, config)
    else:
        mixer = load_attention(weights, config)
    mlp = load_gated_mlp(weights, DENSE_MLP, config.hidden_size, config.intermediate_size)
    return load_mixer_layer(weights, config, mixer, mlp)


FAMILY = Family(
    _configure,
    _load_layer,
    {
        "intermediate_size": 14336,
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    },
    tensor_names=(
        ("model.norm.", "model.final_layernorm."),
        (".post_attention_layernorm.", ".pre_ff_layernorm."),
        (".mlp.", ".feed_forward."),
    ),
)
