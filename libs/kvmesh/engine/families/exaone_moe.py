"""K-EXAONE: norms per head, DeepSeek's routing of experts beside a shared one. In models with
windows, layers without one are not rotated.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families import exaone4
from kvmesh.engine.families.family import grouped_experts
from kvmesh.engine.json_fields import Fields

_EXPERTS = MoeConfig(
    num_experts=64,
    top_k=8,
    intermediate_size=1024,
    normalize=True,
    sparse_layers=frozenset(),
    scale=2.5,
    biased_choice=True,
)
"""Defaults for keys that published files may omit."""


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    moe = grouped_experts(fields, config.num_layers, _EXPERTS, usual_dense=1)
    return replace(exaone4.FAMILY.configure(fields, config), moe=moe)


FAMILY = replace(
    exaone4.FAMILY,
    configure=_configure,
    aliases=(("num_shared_experts", "n_shared_experts"),),
    tensor_names=((".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),),
)
