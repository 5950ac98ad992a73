"""OLMoE: experts in all layers, norms of queries and keys over all heads."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    # Its norms of queries and keys are as wide as the stream.
    fields.only("head_dim", config.hidden_size // config.num_heads)
    moe = MoeConfig(
        num_experts=fields.number("num_experts", int, default=64),
        top_k=fields.number("num_experts_per_tok", int, default=8),
        intermediate_size=config.intermediate_size,
        normalize=fields.flag("norm_topk_prob"),
        sparse_layers=frozenset(range(config.num_layers)),
    )
    return replace(config, wide_qk_norm=True, moe=moe)


FAMILY = Family(_configure, {"rms_norm_eps": 1e-5})
