"""Apertus: norms of queries and keys, an MLP without a gate whose activation (xIELU) is learned."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, qk_norm=True, gated_mlp=False)


FAMILY = Family(
    _configure,
    {
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "llama3",
            "rope_theta": 12e6,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    rope_theta=12e6,
    activations=("xielu",),
    tensor_names=(
        (".input_layernorm.", ".attention_layernorm."),
        (".post_attention_layernorm.", ".feedforward_layernorm."),
    ),
)
