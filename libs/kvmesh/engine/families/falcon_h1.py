"""Falcon-H1: attention and Mamba-2 in parallel in every layer. It scales most intermediate results;
the factors are multiplied into the weights as they are read.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import LinearConfig, ModelConfig, RowFactors
from kvmesh.engine.families.family import Family
from kvmesh.engine.families.mamba_fields import mamba_shape
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("attention_bias", False)
    fields.only("projectors_bias", False)
    is_normed = fields.flag("mamba_rms_norm")
    if is_normed and fields.flag("mamba_norm_before_gate", default=True):
        raise CheckpointError(f"{fields.origin}: mamba_norm_before_gate is not supported")
    values = fields.number("mamba_expand", int, default=2) * config.hidden_size
    if fields.raw["mamba_d_ssm"] is not None:
        values = fields.number("mamba_d_ssm", int)
    shape = mamba_shape(fields, frozenset(range(config.num_layers)), values)
    return replace(
        config,
        linear=shape,
        states_beside=True,
        state_norm_eps=config.rms_norm_eps if is_normed else 0.0,
        embedding_scale=fields.number("embedding_multiplier", float, default=1.0),
        logit_scale=fields.number("lm_head_multiplier", float, default=1.0),
        weight_factors=_factors(fields, shape),
    )


def _factors(fields: Fields, shape: LinearConfig) -> RowFactors:
    """Returns the factors of weight rows."""

    def factor(name: str) -> float:
        return fields.number(name, float, default=1.0)

    def several(name: str, count: int) -> tuple[float, ...]:
        if fields.raw.get(name) is None:
            return (1.0,) * count
        found = fields.reals(name)
        if len(found) != count:
            raise CheckpointError(f"{fields.origin}: {name} must be {count} numbers")
        return found

    values = shape.num_value_heads * shape.value_dim
    of_groups = shape.num_key_heads * shape.key_dim
    # The gate; the convolution's input: values, keys and queries; durations.
    runs = (values, values, of_groups, of_groups, shape.num_value_heads)
    before = factor("ssm_in_multiplier")
    read = factor("attention_in_multiplier")
    gate, down = several("mlp_multipliers", 2)
    return (
        (
            "mamba.in_proj.weight",
            tuple(
                (rows, before * each)
                for rows, each in zip(runs, several("ssm_multipliers", 5), strict=True)
            ),
        ),
        ("mamba.out_proj.weight", ((0, factor("ssm_out_multiplier")),)),
        ("self_attn.q_proj.weight", ((0, read),)),
        ("self_attn.k_proj.weight", ((0, read * factor("key_multiplier")),)),
        ("self_attn.v_proj.weight", ((0, read),)),
        ("self_attn.o_proj.weight", ((0, factor("attention_out_multiplier")),)),
        ("mlp.gate_proj.weight", ((0, gate),)),
        ("mlp.down_proj.weight", ((0, down),)),
    )


FAMILY = Family(
    _configure,
    {
        "intermediate_size": 14336,
        "mamba_d_ssm": 1024,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    },
    tensor_names=(
        ("model.norm.", "model.final_layernorm."),
        (".post_attention_layernorm.", ".pre_ff_layernorm."),
        (".mlp.", ".feed_forward."),
    ),
)
