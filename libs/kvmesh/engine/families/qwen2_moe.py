"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts in most layers, one of them shared and gated."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families.family import Family, qwen_sparse_layers
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("use_sliding_window", False)
    moe = MoeConfig(
        num_experts=fields.number("num_experts", int, default=60),
        top_k=fields.number("num_experts_per_tok", int, default=4),
        intermediate_size=fields.number("moe_intermediate_size", int, default=1408),
        normalize=fields.flag("norm_topk_prob"),
        sparse_layers=qwen_sparse_layers(fields, config),
        shared_size=fields.number("shared_expert_intermediate_size", int, default=5632),
    )
    return replace(
        config, qkv_bias=fields.flag("qkv_bias", default=True), output_bias=False, moe=moe
    )


FAMILY = Family(_configure)
