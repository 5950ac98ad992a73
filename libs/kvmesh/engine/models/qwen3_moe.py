"""Qwen3-MoE: Qwen3 with experts in most layers."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.experts import experts_or_dense, load_softmax_routed
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import MixerLayer
from kvmesh.engine.models.family import Family, qwen_sparse_layers
from kvmesh.engine.weights import LayerWeights


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("use_sliding_window", False)
    # transformers writes the number under its own name, the published files under another.
    key = "num_experts" if "num_experts" in fields.raw else "num_local_experts"
    moe = MoeConfig(
        num_experts=fields.number(key, int, default=128),
        top_k=fields.number("num_experts_per_tok", int, default=8),
        intermediate_size=fields.number("moe_intermediate_size", int),
        normalize=fields.flag("norm_topk_prob"),
        sparse_layers=qwen_sparse_layers(fields, config),
    )
    return replace(config, qk_norm=True, moe=moe)


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    mlp = experts_or_dense(weights, config, load_softmax_routed)
    return load_pre_norm_layer(weights, config, mlp)


FAMILY = Family(_configure, _load_layer)
