"""Gemma 3: windows in most layers with their own rope, norms before and after each part.

Vision-language checkpoints are read for text only.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, RopeConfig
from kvmesh.engine.families.family import (
    SEEING_PREFIX,
    Family,
    rope_of_windows,
    types_or_each_nth,
    windows_of_types,
)
from kvmesh.engine.json_fields import Fields

# Norm weights are stored as their difference from one.
NORM_OFFSET = 1.0


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    types = types_or_each_nth(fields, config.num_layers, 6)
    # Older files scale only the rope of layers with full attention.
    older = RopeConfig(fields.number("rope_local_base_freq", float, default=10000.0))
    scalar = fields.number("query_pre_attn_scalar", float, default=256.0)
    return replace(
        config,
        qk_norm=True,
        windows=windows_of_types(fields, types),
        local_rope=rope_of_windows(fields, 10000.0, older),
        attention_scale=scalar**-0.5,
        embedding_scale=config.hidden_size**0.5,
    )


FAMILY = Family(
    _configure,
    {
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "vocab_size": 262208,
    },
    rope_theta=1e6,
    activations=("gelu_pytorch_tanh",),
    rounds_embedding_scale=True,
    norm_offset=NORM_OFFSET,
)

SEEING = replace(FAMILY, weight_prefix=SEEING_PREFIX, decoders={"gemma3_text": {}})
