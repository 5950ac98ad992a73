"""GLM-4.5 to 4.7: half of each head is rotated; DeepSeek's routing of experts beside a shared one.
Solar Open: the same with whole heads rotated and experts in all layers.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families.family import Family, grouped_experts
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rotary_dim

_EXPERTS = MoeConfig(
    num_experts=128,
    top_k=8,
    intermediate_size=1408,
    normalize=True,
    sparse_layers=frozenset(),
    biased_choice=True,
)
"""Defaults for keys that published files may omit."""

_SOLAR_EXPERTS = replace(_EXPERTS, intermediate_size=1280)


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        qk_norm=fields.flag("use_qk_norm"),
        output_bias=False,
        rotary_dim=rotary_dim(fields, config.head_dim, default=0.5),
        moe=grouped_experts(fields, config.num_layers, _EXPERTS, usual_dense=1),
    )


def _configure_solar(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("first_k_dense_replace", 0)
    fields.only("use_qk_norm", False)
    moe = grouped_experts(fields, config.num_layers, _SOLAR_EXPERTS, usual_dense=0)
    return replace(config, output_bias=False, moe=moe)


_DEFAULTS = {"rms_norm_eps": 1e-5}

_ALIASES = (("n_routed_experts", "num_experts"),)

GLM4 = Family(_configure, _DEFAULTS, aliases=_ALIASES)

SOLAR = Family(
    _configure_solar,
    _DEFAULTS | {"head_dim": 128, "num_key_value_heads": 8},
    rope_theta=1e6,
    aliases=_ALIASES,
)
