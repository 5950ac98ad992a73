"""K-EXAONE: norms of heads, DeepSeek's choice of experts beside a shared one; where there are
windows, layers without one are not rotated.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.experts import experts_or_dense, load_group_routed
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import MixerLayer
from kvmesh.engine.models import exaone4
from kvmesh.engine.models.family import grouped_experts
from kvmesh.engine.weights import LayerWeights

_EXPERTS = MoeConfig(
    num_experts=64,
    top_k=8,
    intermediate_size=1024,
    normalize=True,
    sparse_layers=frozenset(),
    scale=2.5,
    biased_choice=True,
)
"""What the published files may leave out."""


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    moe = grouped_experts(fields, config.num_layers, _EXPERTS, usual_dense=1)
    return replace(exaone4.FAMILY.configure(fields, config), moe=moe)


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    mlp = experts_or_dense(weights, config, load_group_routed)
    return load_pre_norm_layer(weights, config, mlp)


FAMILY = replace(
    exaone4.FAMILY,
    configure=_configure,
    load_layer=_load_layer,
    aliases=(("num_shared_experts", "n_shared_experts"),),
    tensor_names=((".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),),
)
