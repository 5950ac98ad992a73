"""Helium: Llama whose rotated pairs are neighbours."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    # The output projection's input is as wide as the stream.
    fields.only("head_dim", config.hidden_size // config.num_heads)
    return replace(config, interleaved=True, output_bias=False)


FAMILY = Family(
    _configure,
    {"head_dim": 128, "rms_norm_eps": 1e-8},
    rope_theta=100000.0,
)
