"""LFM2: short convolutions in most layers, attention with norms of queries and keys in the others.
MLPs are dense, or most are experts chosen by sigmoid scores.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import LinearConfig, ModelConfig, MoeConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    size = fields.number("block_ff_dim", int, default=config.intermediate_size)
    if fields.flag("block_auto_adjust_ff_dim", default=True):
        size = _adjusted(fields, size)
    attention = fields.numbers("full_attn_idxs")
    types = fields.layer_types(config.num_layers)
    if types is None and fields.raw.get("full_attn_idxs") is not None:
        types = tuple(
            "full_attention" if layer in attention else "conv" for layer in range(config.num_layers)
        )
    return replace(_as_in_version_2(fields, config, types or ()), intermediate_size=size)


def _adjusted(fields: Fields, size: int) -> int:
    """Returns the MLP's size: two thirds of the file's number, rounded up to whole steps."""
    step = fields.number("block_multiple_of", int, default=256)
    share = fields.number("block_ffn_dim_multiplier", float, default=1.0)
    return -(-int(share * int(2 * size / 3)) // step) * step


def _configure_sparse(fields: Fields, config: ModelConfig) -> ModelConfig:
    moe = MoeConfig(
        num_experts=fields.number("num_experts", int, default=32),
        top_k=fields.number("num_experts_per_tok", int, default=4),
        intermediate_size=fields.number("moe_intermediate_size", int, default=1792),
        normalize=fields.flag("norm_topk_prob", default=True),
        sparse_layers=frozenset(range(fields.count("num_dense_layers", 2), config.num_layers)),
        scale=fields.number("routed_scaling_factor", float, default=1.0),
        biased_choice=fields.flag("use_expert_bias", default=True),
    )
    types = fields.layer_types(config.num_layers) or ()
    return replace(_as_in_version_2(fields, config, types), moe=moe)


def with_convolutions(
    fields: Fields, config: ModelConfig, types: tuple[str, ...], *, usual_kernel: int = 3
) -> ModelConfig:
    """Returns a config with norms per head, and convolutions in the layers of that type.

    Args:
        usual_kernel: default number of inputs that a convolution spans.

    Raises:
        CheckpointError: a value is malformed or not supported.
    """
    fields.only("conv_bias", False)
    layers = frozenset(layer for layer, kind in enumerate(types) if kind == "conv")
    kernel = fields.number("conv_L_cache", int, default=usual_kernel)
    if kernel == 1:
        raise CheckpointError(f"{fields.origin}: conv_L_cache 1 is not supported")
    shape = LinearConfig(
        layers=layers,
        num_key_heads=0,
        num_value_heads=1,
        key_dim=0,
        value_dim=config.hidden_size,
        conv_kernel=kernel,
    )
    return replace(
        config,
        qk_norm=True,
        linear=shape if layers else None,
    )


def _as_in_version_2(fields: Fields, config: ModelConfig, types: tuple[str, ...]) -> ModelConfig:
    return replace(
        with_convolutions(fields, config, types),
        qkv_bias=False,
        output_bias=False,
        # The older key takes precedence.
        tie_word_embeddings=fields.flag("tie_embedding", default=config.tie_word_embeddings),
    )


_DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}

DENSE = Family(
    _configure,
    _DEFAULTS | {"intermediate_size": 12288},
    rope_theta=1e6,
    aliases=(("norm_eps", "rms_norm_eps"),),
    tensor_names=(
        (".input_layernorm.", ".operator_norm."),
        (".post_attention_layernorm.", ".ffn_norm."),
        (".self_attn.o_proj.", ".self_attn.out_proj."),
        (".q_norm.", ".q_layernorm."),
        (".k_norm.", ".k_layernorm."),
        (".mlp.gate_proj.", ".mlp.w1."),
        (".mlp.up_proj.", ".mlp.w3."),
        (".mlp.down_proj.", ".mlp.w2."),
        (".mlp.", ".feed_forward."),
        ("model.norm.", "model.embedding_norm."),
    ),
)

SPARSE = replace(
    DENSE, configure=_configure_sparse, defaults=_DEFAULTS | {"intermediate_size": 7168}
)
