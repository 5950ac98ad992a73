"""Mistral: Llama, and in its first version a window in all layers; Ministral: in some or all.

Mistral Small 3.1 also sees pictures; it is read for text only.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.models.family import SEEING_PREFIX, Family, uniform_window, windows_of_types


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


_DEFAULTS = {"sliding_window": 4096}
FAMILY = Family(_configure, load_pre_norm_layer, _DEFAULTS)
MINISTRAL = Family(_configure_ministral, load_pre_norm_layer, _DEFAULTS)
SEEING = replace(
    FAMILY,
    # transformers ties unless the files have a head of their own, and so it is done here.
    defaults=_DEFAULTS | {"tie_word_embeddings": True},
    weight_prefix=SEEING_PREFIX,
    decoders={"mistral": {}},
)
