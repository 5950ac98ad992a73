"""Hy3: norms of queries and keys; most layers have experts, chosen by biased sigmoid scores, beside
shared ones.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families.family import Family, grouped_experts
from kvmesh.engine.json_fields import Fields

_EXPERTS = MoeConfig(
    num_experts=192,
    top_k=8,
    intermediate_size=1536,
    normalize=True,
    sparse_layers=frozenset(),
    scale=2.826,
    biased_choice=True,
)
"""Defaults for keys that published files may omit."""


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("norm_topk_prob", True)
    moe = grouped_experts(fields, config.num_layers, _EXPERTS, usual_dense=1)
    return replace(config, qk_norm=True, moe=moe)


FAMILY = Family(
    _configure,
    {
        "head_dim": 128,
        "intermediate_size": 13312,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    },
    rope_theta=11_158_840.0,
    aliases=(
        ("num_shared_experts", "n_shared_experts"),
        ("router_scaling_factor", "routed_scaling_factor"),
    ),
    tensor_names=(
        (".mlp.gate.e_score_correction_bias", ".mlp.expert_bias"),
        (".mlp.gate.weight", ".mlp.router.gate.weight"),
        (".mlp.shared_experts.", ".mlp.shared_mlp."),
    ),
)
