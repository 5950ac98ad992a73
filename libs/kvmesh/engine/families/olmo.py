"""OLMo 2 and 3: norms after attention and MLP, and of queries and keys over all heads. Version 3
has windows in most layers.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, RopeConfig
from kvmesh.engine.families.family import (
    Family,
    rope_of_windows,
    types_or_each_nth,
    windows_of_types,
)
from kvmesh.engine.json_fields import Fields


def _configure_v2(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, wide_qk_norm=True)


def _configure_v3(fields: Fields, config: ModelConfig) -> ModelConfig:
    types = types_or_each_nth(fields, config.num_layers, 4)
    # Older files scale only the rope of full layers, and versions of transformers disagree about
    # any other base than the published one.
    fields.only("rope_theta", _THETA)
    return replace(
        config,
        wide_qk_norm=True,
        windows=windows_of_types(fields, types),
        local_rope=rope_of_windows(fields, _THETA, RopeConfig(_THETA)),
    )


_THETA = 500000.0

V2 = Family(_configure_v2, {"rms_norm_eps": 1e-5})

V3 = Family(
    _configure_v3,
    {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    rope_theta=_THETA,
)
