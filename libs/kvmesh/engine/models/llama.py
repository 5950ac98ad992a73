"""Llama 2 and 3."""

from __future__ import annotations

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.models.family import Family


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return config


FAMILY = Family(_configure, load_pre_norm_layer)
