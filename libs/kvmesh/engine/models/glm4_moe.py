"""GLM-4.5 to 4.7: half of a head is rotated, DeepSeek's choice of experts beside a shared one."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.experts import experts_or_dense, load_group_routed
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import MixerLayer
from kvmesh.engine.models.family import Family, grouped_experts
from kvmesh.engine.rope_fields import rotary_dim
from kvmesh.engine.weights import LayerWeights

_EXPERTS = MoeConfig(
    num_experts=128,
    top_k=8,
    intermediate_size=1408,
    normalize=True,
    sparse_layers=frozenset(),
    biased_choice=True,
)
"""What the published files may leave out."""


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        qk_norm=fields.flag("use_qk_norm"),
        output_bias=False,
        rotary_dim=rotary_dim(fields, config.head_dim, default=0.5),
        moe=grouped_experts(fields, config.num_layers, _EXPERTS, usual_dense=1),
    )


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    mlp = experts_or_dense(weights, config, load_group_routed)
    return load_pre_norm_layer(weights, config, mlp)


FAMILY = Family(
    _configure,
    _load_layer,
    {"rms_norm_eps": 1e-5},
    aliases=(("n_routed_experts", "num_experts"),),
)
