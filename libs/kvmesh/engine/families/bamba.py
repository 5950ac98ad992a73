"""Bamba: Mamba-2 in most layers; the layers named in the file have attention with half of each head
rotated.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.families.mamba_fields import mamba_shape
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rotary_dim


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


FAMILY = Family(
    _configure,
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
