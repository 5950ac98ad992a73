"""EXAONE 4: norms behind attention and MLP and of each head; where there are windows, layers
without one are not rotated.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.models.family import Family, windows_of_types
from kvmesh.engine.norm_orders import load_post_norm_layer


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    config = replace(config, qk_norm=True, qkv_bias=False, output_bias=False)
    if fields.raw.get("sliding_window") is None:
        return config
    types = fields.layer_types(config.num_layers)
    if types is None:
        every = fields.number("sliding_window_pattern", int, default=4)
        types = tuple(
            "sliding_attention" if (layer + 1) % every else "full_attention"
            for layer in range(config.num_layers)
        )
    windows = windows_of_types(fields, types)
    full = frozenset(layer for layer, window in enumerate(windows) if not window)
    return replace(config, windows=windows, unrotated=full)


FAMILY = Family(_configure, load_post_norm_layer, {"rms_norm_eps": 1e-5, "sliding_window": 4096})
