"""Arcee (AFM-4.5B): Llama whose MLP has no gate but squares what is positive."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import MixerLayer
from kvmesh.engine.models.family import Family
from kvmesh.engine.plain_mlp import load_plain_mlp
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import reference


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, gated_mlp=False, mlp_bias=fields.flag("mlp_bias"))


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    mlp = load_plain_mlp(weights, config, reference.squared_relu)
    return load_pre_norm_layer(weights, config, mlp)


FAMILY = Family(
    _configure,
    _load_layer,
    {"rms_norm_eps": 1e-5},
    activations=("relu2",),
    computed_keys=frozenset({"mlp_bias"}),
)
