"""Code World Model: Llama with a window in all layers except each fourth, starting at the first."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family, windows_of_types
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    types = fields.layer_types(config.num_layers)
    if types is None:
        types = tuple(
            "sliding_attention" if layer % 4 else "full_attention"
            for layer in range(config.num_layers)
        )
    windows = windows_of_types(fields, types)
    return replace(config, windows=windows, qkv_bias=False, output_bias=False)


FAMILY = Family(
    _configure,
    {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "sliding_window": 8192,
        "eos_token_id": [128001, 128008, 128009],
        "rope_scaling": {
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    rope_theta=1e6,
)
