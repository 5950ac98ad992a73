"""Mistral: Llama, and in its first version a window in all layers."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.models.family import Family, uniform_window


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(
        config, windows=uniform_window(fields, config), qkv_bias=False, output_bias=False
    )


FAMILY = Family(_configure, load_pre_norm_layer, {"sliding_window": 4096})
