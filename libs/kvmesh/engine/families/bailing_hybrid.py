"""Bailing hybrid (Ling 3.0): KDA in most layers, latent attention with a gate per head in the
others, and DeepSeek's routing of experts.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import LinearConfig, ModelConfig, MoeConfig
from kvmesh.engine.families.family import EXPERT_ALIASES, Family, grouped_experts, latent_shape
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import yarn_scale


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("score_function", "sigmoid")
    latent = latent_shape(fields, interleaved=True)
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5
    bound = fields.real("kda_lower_bound", default=-5.0)
    return replace(
        config,
        # The head is never tied, whatever the file says: transformers ties none of this family.
        tie_word_embeddings=False,
        head_dim=latent.rope_dim,
        latent=latent,
        linear=_linear(fields, config),
        moe=grouped_experts(fields, config.num_layers, _EXPERTS, usual_dense=2),
        attention_scale=scale * yarn_scale(fields) ** 2,
        decay_bound=bound if fields.flag("kda_safe_gate", default=True) else 0.0,
    )


def _linear(fields: Fields, config: ModelConfig) -> LinearConfig:
    types = fields.layer_types(config.num_layers)
    if types is None:
        every = fields.number("layer_group_size", int, default=6)
        layers = frozenset(i for i in range(config.num_layers) if (i + 1) % every)
    else:
        layers = frozenset(i for i, kind in enumerate(types) if kind == "linear_attention")
    taps = fields.number("short_conv_kernel_size", int, default=4)
    heads = fields.number("linear_num_heads", int, default=config.num_heads)
    size = fields.number("linear_head_dim", int, default=config.head_dim)
    return LinearConfig(
        layers=layers,
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=size,
        value_dim=size,
        conv_kernel=fields.number("linear_conv_kernel_dim", int, default=taps),
    )


_EXPERTS = MoeConfig(
    num_experts=512,
    top_k=8,
    intermediate_size=768,
    normalize=True,
    sparse_layers=frozenset(),
    shared_size=768,
    num_groups=8,
    top_groups=4,
    scale=2.5,
    biased_choice=True,
)
"""Defaults for keys that published files may omit."""


FAMILY = Family(
    _configure,
    {"head_dim": 128},
    rope_theta=6e6,
    aliases=EXPERT_ALIASES,
    tensor_names=(
        ("model.embed_tokens.", "model.word_embeddings."),
        (".self_attn.o_proj.", ".self_attn.dense."),
        (".self_attn.", ".attention."),
        (".gate.e_score_correction_bias", ".gate.expert_bias"),
    ),
)
