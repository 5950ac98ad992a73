"""Qwen3.5, dense and with experts: Qwen3-Next's layers with plainly laid out projections.

Vision-language checkpoints hold the decoder as `language_model` and its keys in `text_config`. They
are read for text only, where their rope of three axes equals the usual one.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families.family import SEEING_PREFIX, Family
from kvmesh.engine.families.qwen3_next import NORM_OFFSET, gated_delta_shape
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rotary_dim


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("attn_output_gate", True)
    fields.only("attention_bias", False)
    return replace(
        config,
        qk_norm=True,
        rotary_dim=rotary_dim(fields, config.head_dim, default=0.25),
        linear=gated_delta_shape(fields, config.num_layers),
    )


def _configure_moe(fields: Fields, config: ModelConfig) -> ModelConfig:
    moe = MoeConfig(
        num_experts=fields.number("num_experts", int, default=256),
        top_k=fields.number("num_experts_per_tok", int, default=8),
        intermediate_size=fields.number("moe_intermediate_size", int, default=512),
        normalize=True,
        sparse_layers=frozenset(range(config.num_layers)),
        shared_size=fields.number("shared_expert_intermediate_size", int, default=512),
    )
    return replace(_configure(fields, config), moe=moe)


DENSE = Family(_configure, {"head_dim": 256}, norm_offset=NORM_OFFSET)

SPARSE = Family(_configure_moe, {"head_dim": 256}, norm_offset=NORM_OFFSET)

SEEING_DENSE = replace(DENSE, weight_prefix=SEEING_PREFIX, decoders={"qwen3_5_text": {}})

SEEING_SPARSE = replace(SPARSE, weight_prefix=SEEING_PREFIX, decoders={"qwen3_5_moe_text": {}})
