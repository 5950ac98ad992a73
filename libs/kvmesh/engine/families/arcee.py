"""Arcee (AFM-4.5B): Llama with an MLP without a gate, activated by squared ReLU."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, gated_mlp=False, mlp_bias=fields.flag("mlp_bias"))


FAMILY = Family(
    _configure,
    {"rms_norm_eps": 1e-5},
    activations=("relu2",),
    computed_keys=frozenset({"mlp_bias"}),
)
