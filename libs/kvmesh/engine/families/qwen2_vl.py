"""Qwen2-VL and Qwen2.5-VL: Qwen2 with vision; read for text only, where the rope of three axes
equals the usual one.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import SEEING_PREFIX, Family, qwen_windows
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("head_dim", config.hidden_size // config.num_heads)
    windows = qwen_windows(fields, config)
    return replace(config, qkv_bias=True, output_bias=False, windows=windows)


V2 = Family(
    _configure,
    {"max_window_layers": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    rope_theta=1e6,
    decoders={"qwen2_vl_text": {}},
    older_lie_open=True,
    weight_prefix=SEEING_PREFIX,
)

V2_5 = replace(V2, decoders={"qwen2_5_vl_text": {}})
