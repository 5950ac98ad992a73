"""Ernie 4.5 with experts, chosen by biased softmax scores, beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    # The minimum of a sum of scores, which no row comes near.
    fields.only("moe_norm_min", 1e-12)
    size = fields.number("moe_intermediate_size", int, default=1536)
    moe = MoeConfig(
        num_experts=fields.number("num_experts", int, default=64),
        top_k=fields.number("num_experts_per_tok", int, default=6),
        intermediate_size=size,
        normalize=True,
        sparse_layers=_sparse_layers(fields, config.num_layers),
        shared_size=size * fields.count("moe_num_shared_experts", default=2),
        biased_choice=True,
    )
    return replace(config, interleaved=True, qkv_bias=False, output_bias=False, moe=moe)


def _sparse_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    first = fields.count("moe_layer_start_index", default=1)
    last = num_layers - 1
    if fields.raw.get("moe_layer_end_index") != -1:
        last = min(fields.count("moe_layer_end_index", default=last), last)
    every = fields.number("moe_layer_interval", int, default=1)
    return frozenset(layer for layer in range(first, last + 1) if (layer + 1) % every == 0)


FAMILY = Family(
    _configure,
    {"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    rope_theta=500000.0,
    aliases=(("moe_k", "num_experts_per_tok"), ("moe_num_experts", "num_experts")),
)
