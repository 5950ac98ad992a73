"""Mixtral: Mistral with experts in all layers."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families.family import Family, uniform_window
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    moe = MoeConfig(
        num_experts=fields.number("num_local_experts", int, default=8),
        top_k=fields.number("num_experts_per_tok", int, default=2),
        intermediate_size=config.intermediate_size,
        normalize=True,
        sparse_layers=frozenset(range(config.num_layers)),
    )
    windows = uniform_window(fields, config)
    return replace(config, windows=windows, moe=moe, qkv_bias=False, output_bias=False)


FAMILY = Family(_configure, {"rms_norm_eps": 1e-5}, rope_theta=1e6)
