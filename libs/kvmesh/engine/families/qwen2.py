"""Qwen2 and 2.5: Llama with biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family, qwen_windows
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    windows = qwen_windows(fields, config)
    return replace(config, qkv_bias=True, output_bias=False, windows=windows)


FAMILY = Family(_configure)
