"""Qwen3-MoE: Qwen3 with experts in most layers.

Qwen3-VL-MoE has the same decoder and is read for text only, where its rope of three axes equals the
usual one.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families.family import SEEING_PREFIX, Family, qwen_sparse_layers
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig, *, usual_experts: int = 128) -> ModelConfig:
    fields.only("use_sliding_window", False)
    # transformers writes the number under its own key, published files under another.
    key = "num_experts" if "num_experts" in fields.raw else "num_local_experts"
    moe = MoeConfig(
        num_experts=fields.number(key, int, default=usual_experts),
        top_k=fields.number("num_experts_per_tok", int, default=8),
        intermediate_size=fields.number("moe_intermediate_size", int),
        normalize=fields.flag("norm_topk_prob"),
        sparse_layers=qwen_sparse_layers(fields, config),
    )
    return replace(config, qk_norm=True, moe=moe)


def _configure_seeing(fields: Fields, config: ModelConfig) -> ModelConfig:
    # The weights of the chosen experts sum to 1, whatever the file says.
    summed = Fields({**fields.raw, "norm_topk_prob": True}, fields.origin)
    return _configure(summed, config, usual_experts=60)


FAMILY = Family(_configure)

SEEING = Family(
    _configure_seeing,
    {"moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_key_value_heads": 16},
    rope_theta=500000.0,
    weight_prefix=SEEING_PREFIX,
    decoders={"qwen3_vl_moe_text": {}},
)
