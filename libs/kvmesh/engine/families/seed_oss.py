"""Seed-OSS: Llama with biases of queries, keys and values, and optionally of the output."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        qkv_bias=fields.flag("attention_bias", default=True),
        output_bias=fields.flag("attention_out_bias"),
    )


FAMILY = Family(_configure, {"head_dim": 128})
