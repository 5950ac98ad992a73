"""Qwen3: Llama with norms of queries and keys, per head.

Qwen3-VL has the same decoder and is read for text only, where its rope of three axes equals the
usual one.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import SEEING_PREFIX, Family, qwen_windows
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, qk_norm=True, windows=qwen_windows(fields, config))


def _configure_seeing(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, qk_norm=True)


# The head size is independent of the hidden size, and files may omit it.
FAMILY = Family(_configure, {"head_dim": 128})

SEEING = Family(
    _configure_seeing,
    {"head_dim": 128},
    rope_theta=500000.0,
    weight_prefix=SEEING_PREFIX,
    decoders={"qwen3_vl_text": {}},
)
