"""Command R, R7B and A: attention and MLP in parallel after one LayerNorm. The second version has
windows in most layers and rotates only in those.

The mean of each part is subtracted before the part is added to the stream. The stream then has mean
zero, so its norms are RMS norms like those of other families.
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
    fields.only("use_gated_activation", True)
    fields.only("use_parallel_block", True)
    fields.only("use_qk_norm", False)
    scale = fields.number("logit_scale", float, default=0.0625)
    return replace(config, interleaved=True, logit_scale=scale)


def _configure_v2(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("head_dim", config.hidden_size // config.num_heads)
    windows = windows_of_types(fields, types_or_each_nth(fields, config.num_layers, 4))
    return unrotated_without_window(replace(_configure(fields, config), windows=windows))


_DEFAULTS = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}

_ALIASES = (("layer_norm_eps", "rms_norm_eps"),)

V1 = Family(_configure, _DEFAULTS, rope_theta=500000.0, aliases=_ALIASES)

V2 = Family(_configure_v2, _DEFAULTS | {"sliding_window": 4096}, aliases=_ALIASES)
