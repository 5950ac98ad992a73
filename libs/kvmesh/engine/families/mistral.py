"""Mistral: Llama, in its first version with a window in all layers; Ministral: in some or all
layers.
Ministral 3: queries are scaled by position.

Mistral Small 3.1 and Ministral 3 are vision-language models, read for text only.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import ModelConfig, QueryGrowth
from kvmesh.engine.families.family import SEEING_PREFIX, Family, uniform_window, windows_of_types
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rope_parameters


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(
        config, windows=uniform_window(fields, config), qkv_bias=False, output_bias=False
    )


def _configure_ministral(fields: Fields, config: ModelConfig) -> ModelConfig:
    types = fields.layer_types(config.num_layers)
    if types is None:
        return _configure(fields, config)
    windows = windows_of_types(fields, types)
    return replace(config, windows=windows, qkv_bias=False, output_bias=False)


def _configure_ministral3(fields: Fields, config: ModelConfig) -> ModelConfig:
    table = rope_parameters(fields)
    missing = [key for key in (_SHARE, _LENGTH) if table.get(key) is None]
    if missing:
        raise CheckpointError(f"{fields.origin}: rope_parameters without {' and '.join(missing)}")
    own = Fields(table, fields.origin)
    growth = QueryGrowth(own.real(_SHARE, 0.0), own.number(_LENGTH, int))
    return replace(_configure(fields, config), query_growth=growth)


def _configure_seeing(fields: Fields, config: ModelConfig) -> ModelConfig:
    is_third = fields.table("text_config").get("model_type") == "ministral3"
    return (_configure_ministral3 if is_third else _configure)(fields, config)


_SHARE, _LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"

_DEFAULTS = {"sliding_window": 4096}

_DEFAULTS3 = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        _LENGTH: 16384,
        _SHARE: 0.1,
    },
}

FAMILY = Family(_configure, _DEFAULTS)

MINISTRAL = Family(_configure_ministral, _DEFAULTS)

MINISTRAL3 = Family(_configure_ministral3, _DEFAULTS3)

SEEING = Family(
    _configure_seeing,
    # As in transformers, the head is tied unless the files have one of their own.
    {"tie_word_embeddings": True},
    weight_prefix=SEEING_PREFIX,
    decoders={"mistral": _DEFAULTS, "ministral3": _DEFAULTS3},
)
