"""MiniMax-M2: full attention in all layers, norms of queries and keys over all heads, rotation of a
part of each head, experts chosen by biased sigmoid scores.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rotary_dim


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("qk_norm_type", "per_layer")
    fields.only("scoring_func", "sigmoid")
    fields.only("shared_intermediate_size", 0)
    fields.only("use_qk_norm", True)
    fields.only("use_routing_bias", True)
    if 0 in fields.numbers("attn_type_list"):
        raise CheckpointError(f"{fields.origin}: attn_type_list has linear attention")
    # Published files give the number of elements, transformers a fraction.
    rotated = fields.number("rotary_dim", int, default=config.head_dim)
    moe = MoeConfig(
        num_experts=fields.number("num_local_experts", int, default=256),
        top_k=fields.number("num_experts_per_tok", int, default=8),
        intermediate_size=config.intermediate_size,
        normalize=True,
        sparse_layers=frozenset(range(config.num_layers)),
        biased_choice=True,
    )
    return replace(
        config,
        qkv_bias=False,
        output_bias=False,
        wide_qk_norm=True,
        rotary_dim=rotary_dim(fields, config.head_dim, default=rotated / config.head_dim),
        moe=moe,
    )


FAMILY = Family(
    _configure,
    {"head_dim": 128},
    rope_theta=5e6,
    tensor_names=((".gate.e_score_correction_bias", ".e_score_correction_bias"),),
)
