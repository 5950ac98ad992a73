"""EXAONE 4: norms after attention and MLP and per head. In models with windows, layers without one
are not rotated.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import (
    Family,
    types_or_each_nth,
    unrotated_without_window,
    windows_of_types,
)
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    config = replace(config, qk_norm=True, qkv_bias=False, output_bias=False)
    if fields.raw.get("sliding_window") is None:
        return config
    windows = windows_of_types(fields, types_or_each_nth(fields, config.num_layers, 4))
    return unrotated_without_window(replace(config, windows=windows))


FAMILY = Family(_configure, {"rms_norm_eps": 1e-5, "sliding_window": 4096})
