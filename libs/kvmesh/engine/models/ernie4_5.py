"""Ernie 4.5, dense: Llama whose rotated pairs are neighbours."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.models.family import Family


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, interleaved=True, qkv_bias=False, output_bias=False)


FAMILY = Family(
    _configure,
    load_pre_norm_layer,
    {"head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    rope_theta=500000.0,
)
