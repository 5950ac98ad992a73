"""Kimi Linear: delta attention with a decay per channel (KDA) in most layers, latent attention
without rotation in the others, experts chosen by sigmoid scores.

Source: Kimi Linear, arXiv 2510.26692.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import LinearConfig, ModelConfig, MoeConfig
from kvmesh.engine.families.family import EXPERT_ALIASES, Family, grouped_experts, latent_shape
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("mla_use_nope", True)
    fields.only("moe_layer_freq", 1)
    fields.only("moe_router_activation_func", "sigmoid")
    latent = latent_shape(fields, interleaved=False)
    return replace(
        config,
        # The head is never tied, whatever the file says: transformers ties none of this family.
        tie_word_embeddings=False,
        head_dim=latent.rope_dim,
        latent=latent,
        linear=_linear(fields, config.num_layers),
        moe=grouped_experts(fields, config.num_layers, _EXPERTS, usual_dense=1),
        attention_scale=(latent.nope_dim + latent.rope_dim) ** -0.5,
    )


def _linear(fields: Fields, num_layers: int) -> LinearConfig:
    # Published files have a table for this, which counts layers from one.
    table = fields.table("linear_attn_config")
    own = Fields(table, fields.origin)
    types = fields.layer_types(num_layers)
    if types is not None:
        layers = frozenset(i for i, kind in enumerate(types) if kind == "linear_attention")
    elif "kda_layers" in table:
        layers = frozenset(layer - 1 for layer in own.numbers("kda_layers"))
    else:
        layers = frozenset(layer for layer in range(num_layers) if layer == 0 or layer % 4)
    heads = own.number("num_heads", int, fields.number("linear_num_heads", int, default=32))
    size = own.number("head_dim", int, fields.number("linear_head_dim", int, default=128))
    taps = fields.number("linear_conv_kernel_dim", int, default=4)
    return LinearConfig(
        layers=layers,
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=size,
        value_dim=size,
        conv_kernel=own.number("short_conv_kernel_size", int, default=taps),
    )


_EXPERTS = MoeConfig(
    num_experts=256,
    top_k=8,
    intermediate_size=1024,
    normalize=True,
    sparse_layers=frozenset(),
    shared_size=1024,
    num_groups=1,
    top_groups=1,
    scale=2.446,
    biased_choice=True,
)
"""Defaults for keys that published files may omit."""


FAMILY = Family(_configure, {"rms_norm_eps": 1e-5}, aliases=EXPERT_ALIASES)
