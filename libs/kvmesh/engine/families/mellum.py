"""Mellum 2: Qwen3-MoE with optional windows, whose layers have their own rope."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, MoeConfig, RopeConfig
from kvmesh.engine.families.family import Family, rope_of_windows, sparse_layers, windows_of_types
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    types = fields.layer_types(config.num_layers) or ("full_attention",) * config.num_layers
    moe = MoeConfig(
        num_experts=fields.number("num_experts", int, default=64),
        top_k=fields.number("num_experts_per_tok", int, default=8),
        intermediate_size=fields.number("moe_intermediate_size", int, default=896),
        normalize=fields.flag("norm_topk_prob", default=True),
        sparse_layers=sparse_layers(fields, config.num_layers, 0),
    )
    return replace(
        config,
        qk_norm=True,
        windows=windows_of_types(fields, types),
        local_rope=rope_of_windows(fields, 10000.0, RopeConfig(10000.0)),
        moe=moe,
    )


FAMILY = Family(
    _configure,
    {"head_dim": 128, "sliding_window": 1024},
    rope_theta=500000.0,
    aliases=(("num_local_experts", "num_experts"),),
)
