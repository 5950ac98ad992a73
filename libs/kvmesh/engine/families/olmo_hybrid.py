"""OLMo Hybrid: the gated delta rule with beta up to 2 in most layers. The others have OLMo 2's
attention, rotated only if the file says how.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import LinearConfig, ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rope_parameters


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    heads = fields.number("linear_num_key_heads", int, default=config.num_heads)
    usual_size = max(1, int(0.75 * config.hidden_size / heads))
    key_dim = fields.number("linear_key_head_dim", int, default=usual_size)
    linear = _linear_layers(fields, config.num_layers)
    if not linear:
        raise CheckpointError(f"{fields.origin}: layer_types without linear_attention")
    # Published files have a null base if nothing is rotated.
    theta = rope_parameters(fields).get("rope_theta", fields.raw.get("rope_theta", 1e4))
    layers = range(config.num_layers)
    return replace(
        config,
        wide_qk_norm=True,
        unrotated=frozenset(layers) if theta is None else frozenset(),
        double_shares=fields.flag("linear_allow_neg_eigval", default=True),
        linear=LinearConfig(
            layers=linear,
            num_key_heads=heads,
            num_value_heads=fields.number("linear_num_value_heads", int, default=config.num_heads),
            key_dim=key_dim,
            value_dim=fields.number("linear_value_head_dim", int, default=2 * key_dim),
            conv_kernel=fields.number("linear_conv_kernel_dim", int, default=4),
        ),
    )


def _linear_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    types = fields.layer_types(num_layers)
    if types is not None:
        return frozenset(i for i, kind in enumerate(types) if kind == "linear_attention")
    full = set(range(3, num_layers, 4)) or {num_layers - 1}
    return frozenset(range(num_layers)) - full


FAMILY = Family(
    _configure,
    {"intermediate_size": 11008, "max_position_embeddings": 65536},
    tensor_names=(
        (".linear_attn.norm.", ".linear_attn.o_norm."),
        (".linear_attn.out_proj.", ".linear_attn.o_proj."),
    ),
)
