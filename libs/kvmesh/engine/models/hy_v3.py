"""Hy3: norms of queries and keys, experts in most layers, chosen by biased sigmoid scores, beside
shared ones.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.experts import experts_or_dense, load_group_routed
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import MixerLayer
from kvmesh.engine.models.family import Family, grouped_experts
from kvmesh.engine.weights import LayerWeights

_EXPERTS = MoeConfig(
    num_experts=192,
    top_k=8,
    intermediate_size=1536,
    normalize=True,
    sparse_layers=frozenset(),
    scale=2.826,
    biased_choice=True,
)
"""What the published files may leave out."""


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("norm_topk_prob", True)
    moe = grouped_experts(fields, config.num_layers, _EXPERTS, usual_dense=1)
    return replace(config, qk_norm=True, moe=moe)


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    mlp = experts_or_dense(weights, config, load_group_routed)
    return load_pre_norm_layer(weights, config, mlp)


FAMILY = Family(
    _configure,
    _load_layer,
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
