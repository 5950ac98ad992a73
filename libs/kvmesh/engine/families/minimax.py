"""MiniMax-Text-01: lightning attention in most layers, softmax attention in the others, experts in
all. The output of each norm is the new residual stream; the stream and the addition to it are
scaled.

Source: MiniMax-01, arXiv 2501.08313.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import LinearConfig, ModelConfig, MoeConfig
from kvmesh.engine.families.family import Family, uniform_window
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("rotary_dim", config.head_dim)
    types = fields.layer_types(config.num_layers)
    if types is None:
        layers = frozenset(range(1, config.num_layers, 2))
    else:
        layers = frozenset(i for i, kind in enumerate(types) if kind == "linear_attention")
    experts = "num_local_experts" if "num_local_experts" in fields.raw else "num_experts"

    def factor(name: str) -> float:
        return fields.number(f"{name}_factor", float, default=1.0)

    return replace(
        config,
        windows=uniform_window(fields, config),
        qkv_bias=False,
        output_bias=False,
        linear=LinearConfig(
            layers=layers,
            num_key_heads=config.num_heads,
            num_value_heads=config.num_heads,
            key_dim=config.head_dim,
            value_dim=config.head_dim,
            conv_kernel=1,
        ),
        moe=MoeConfig(
            num_experts=fields.number(experts, int, default=8),
            top_k=fields.number("num_experts_per_tok", int, default=2),
            intermediate_size=config.intermediate_size,
            normalize=True,
            sparse_layers=frozenset(range(config.num_layers)),
        ),
        residual_factors=tuple(
            (factor(f"{kind}_alpha"), factor(f"{kind}_beta"))
            for kind in ("full_attn", "linear_attn", "mlp")
        ),
    )


FAMILY = Family(_configure, {"rms_norm_eps": 1e-5}, rope_theta=1e6)
