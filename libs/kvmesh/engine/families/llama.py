"""Llama 2 and 3; InternLM 3 and IQuest-Coder, whose files are Llama's with other defaults."""

from __future__ import annotations

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return config


def _configure_internlm3(fields: Fields, config: ModelConfig) -> ModelConfig:
    # This flag is for attention; the one for the MLP is refused for all families.
    fields.only("attention_bias", False)
    return config


def _configure_iquest(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("use_sliding_window", False)
    return config


_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-5}

FAMILY = Family(_configure)

INTERNLM3 = Family(
    _configure_internlm3,
    _DEFAULTS,
    aliases=(("qkv_bias", "attention_bias"), ("bias", "mlp_bias")),
)

IQUEST = Family(_configure_iquest, _DEFAULTS)
