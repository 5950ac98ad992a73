"""GLM-4.7-Flash: latent attention and experts as in DeepSeek-V3."""

from __future__ import annotations

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families.deepseek import with_latents
from kvmesh.engine.families.family import Family, grouped_experts
from kvmesh.engine.json_fields import Fields

_EXPERTS = MoeConfig(
    num_experts=64,
    top_k=4,
    intermediate_size=1536,
    normalize=True,
    sparse_layers=frozenset(),
    scale=1.8,
    biased_choice=True,
)
"""Defaults for keys that published files may omit."""


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    # transformers has no other value for this family, whatever the file says.
    fields.only("first_k_dense_replace", 1)
    fields.only("moe_layer_freq", 1)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    moe = grouped_experts(fields, config.num_layers, _EXPERTS, usual_dense=1)
    interleaved = fields.flag("rope_interleave", default=True)
    return with_latents(fields, config, moe, interleaved=interleaved)


FAMILY = Family(
    _configure,
    {"q_lora_rank": 768, "qk_nope_head_dim": 192, "rms_norm_eps": 1e-5, "v_head_dim": 256},
    aliases=(("n_routed_experts", "num_experts"),),
)
