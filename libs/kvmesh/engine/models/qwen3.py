"""Qwen3: Llama with norms of queries and keys, per head."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.models.family import Family, qwen_windows


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, qk_norm=True, windows=qwen_windows(fields, config))


# The head size is fixed apart from the hidden size, and files may leave it out.
FAMILY = Family(_configure, load_pre_norm_layer, {"head_dim": 128})
