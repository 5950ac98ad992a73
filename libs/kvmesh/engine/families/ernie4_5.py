"""Ernie 4.5, dense: Llama whose rotated pairs are neighbours."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, interleaved=True, qkv_bias=False, output_bias=False)


FAMILY = Family(
    _configure,
    {"head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    rope_theta=500000.0,
)
