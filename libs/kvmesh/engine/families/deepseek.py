"""DeepSeek V2 and V3: latent attention (MLA), group-limited routing of experts, shared experts."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families.family import Family, latent_shape
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import yarn_scale


def _moe(fields: Fields, config: ModelConfig, *, is_v3: bool) -> MoeConfig:
    fields.only("moe_layer_freq", 1)
    fields.only("scoring_func", "sigmoid" if is_v3 else "softmax")
    fields.only("topk_method", *(("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")))
    dense = fields.count("first_k_dense_replace", default=3 if is_v3 else 0)
    in_groups = is_v3 or fields.raw.get("topk_method") == "group_limited_greedy"
    size = fields.number("moe_intermediate_size", int)
    return MoeConfig(
        num_experts=fields.number("n_routed_experts", int),
        top_k=fields.number("num_experts_per_tok", int),
        intermediate_size=size,
        normalize=is_v3 and fields.flag("norm_topk_prob", default=True),
        sparse_layers=frozenset(range(dense, config.num_layers)),
        shared_size=size * fields.number("n_shared_experts", int, default=1),
        num_groups=fields.number("n_group", int, default=1) if in_groups else 1,
        top_groups=fields.number("topk_group", int, default=1) if in_groups else 1,
        scale=fields.number("routed_scaling_factor", float, default=2.5 if is_v3 else 1.0),
        biased_choice=is_v3,
    )


def with_latents(
    fields: Fields, config: ModelConfig, moe: MoeConfig, *, interleaved: bool
) -> ModelConfig:
    """Returns a config with latent attention and experts.

    Raises:
        CheckpointError: a value is malformed or not supported.
    """
    latent = latent_shape(fields, interleaved=interleaved)
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5
    return replace(
        config,
        head_dim=latent.rope_dim,
        latent=latent,
        moe=moe,
        attention_scale=scale * yarn_scale(fields) ** 2,
    )


def _configure_v2(fields: Fields, config: ModelConfig) -> ModelConfig:
    # V2 always rotates neighbours; V3's files specify it.
    return with_latents(fields, config, _moe(fields, config, is_v3=False), interleaved=True)


def _configure_v3(fields: Fields, config: ModelConfig) -> ModelConfig:
    interleaved = fields.flag("rope_interleave", default=True)
    moe = _moe(fields, config, is_v3=True)
    return with_latents(fields, config, moe, interleaved=interleaved)


V2 = Family(_configure_v2, {"n_shared_experts": 2, "q_lora_rank": 1536})

V3 = Family(_configure_v3, {"n_group": 8, "topk_group": 4, "q_lora_rank": 1536})
