"""Qwen3-Next: gated delta rule in most layers, gated attention in the others, shared experts."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import LinearConfig, ModelConfig, MoeConfig
from kvmesh.engine.families.family import Family, qwen_sparse_layers
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rotary_dim

# Norm weights are stored as their difference from one, except the delta rule's.
NORM_OFFSET = 1.0


def gated_delta_shape(fields: Fields, num_layers: int) -> LinearConfig:
    """Reads the linear layers and their heads.

    Raises:
        CheckpointError: a value is malformed.
    """
    types = fields.layer_types(num_layers)
    if types is None:
        every = fields.number("full_attention_interval", int, default=4)
        types = tuple(
            "linear_attention" if (layer + 1) % every else "full_attention"
            for layer in range(num_layers)
        )
    return LinearConfig(
        layers=frozenset(i for i, kind in enumerate(types) if kind == "linear_attention"),
        num_key_heads=fields.number("linear_num_key_heads", int, default=16),
        num_value_heads=fields.number("linear_num_value_heads", int, default=32),
        key_dim=fields.number("linear_key_head_dim", int, default=128),
        value_dim=fields.number("linear_value_head_dim", int, default=128),
        conv_kernel=fields.number("linear_conv_kernel_dim", int, default=4),
    )


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("attention_bias", False)
    moe = MoeConfig(
        num_experts=fields.number("num_experts", int, default=512),
        top_k=fields.number("num_experts_per_tok", int, default=10),
        intermediate_size=fields.number("moe_intermediate_size", int, default=512),
        normalize=fields.flag("norm_topk_prob", default=True),
        sparse_layers=qwen_sparse_layers(fields, config),
        shared_size=fields.number("shared_expert_intermediate_size", int, default=512),
    )
    return replace(
        config,
        qk_norm=True,
        rotary_dim=rotary_dim(fields, config.head_dim, default=0.25),
        linear=gated_delta_shape(fields, config.num_layers),
        moe=moe,
    )


FAMILY = Family(
    _configure,
    {"head_dim": 256},
    norm_offset=NORM_OFFSET,
)
