"""gpt-oss: windows in every other layer, sinks, biases, and experts with a clamped activation."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families.family import Family, windows_of_types
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    types = fields.layer_types(config.num_layers)
    if types is None:
        types = tuple(
            "full_attention" if layer % 2 else "sliding_attention"
            for layer in range(config.num_layers)
        )
    moe = MoeConfig(
        num_experts=fields.number("num_local_experts", int),
        top_k=fields.number("num_experts_per_tok", int, default=4),
        intermediate_size=config.intermediate_size,
        normalize=True,
        sparse_layers=frozenset(range(config.num_layers)),
    )
    return replace(
        config,
        windows=windows_of_types(fields, types),
        moe=moe,
        swiglu_alpha=fields.number("swiglu_alpha", float, default=1.702),
        swiglu_limit=fields.number("swiglu_limit", float, default=7.0),
    )


FAMILY = Family(
    _configure,
    {
        "attention_bias": True,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False}
        | {"original_max_position_embeddings": 4096},
        "sliding_window": 128,
    },
    rope_theta=150000.0,
)
