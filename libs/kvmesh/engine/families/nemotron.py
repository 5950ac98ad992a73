"""Nemotron-4 and Minitron: LayerNorms, an MLP without a gate with squared ReLU, rotation of half of
each head.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rotary_dim

# Norm weights are stored as their difference from one.
NORM_OFFSET = 1.0


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        layer_norm=True,
        gated_mlp=False,
        mlp_bias=fields.flag("mlp_bias"),
        rotary_dim=rotary_dim(fields, config.head_dim, default=0.5),
    )


FAMILY = Family(
    _configure,
    {"rms_norm_eps": 1e-5},
    activations=("relu2",),
    computed_keys=frozenset({"mlp_bias"}),
    norm_offset=NORM_OFFSET,
    aliases=(("norm_eps", "rms_norm_eps"),),
)
