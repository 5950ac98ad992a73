"""Nemotron-4 and Minitron: norms that take the mean out, an MLP without a gate that squares what is
positive, rotation of half a head.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layer_norms import SerialLayer, load_serial_layer
from kvmesh.engine.models.family import Family
from kvmesh.engine.plain_mlp import load_plain_mlp
from kvmesh.engine.rope_fields import rotary_dim
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import reference

# Weights of norms are stored as their difference from one.
_NORM_OFFSET = 1.0


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        layer_norm=True,
        gated_mlp=False,
        mlp_bias=fields.flag("mlp_bias"),
        rotary_dim=rotary_dim(fields, config.head_dim, default=0.5),
    )


def _load_layer(weights: LayerWeights, config: ModelConfig) -> SerialLayer:
    mlp = load_plain_mlp(weights, config, reference.squared_relu)
    attention = load_attention(weights, config)
    return load_serial_layer(weights, config, attention, mlp, offset=_NORM_OFFSET)


FAMILY = Family(
    _configure,
    _load_layer,
    {"rms_norm_eps": 1e-5},
    activations=("relu2",),
    computed_keys=frozenset({"mlp_bias"}),
    norm_offset=_NORM_OFFSET,
    aliases=(("norm_eps", "rms_norm_eps"),),
)
