"""dots.llm1: attention as in Qwen3, experts as in DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families.family import Family, grouped_experts, windows_of_types
from kvmesh.engine.json_fields import Fields

_EXPERTS = MoeConfig(
    num_experts=128,
    top_k=6,
    intermediate_size=1408,
    normalize=False,
    sparse_layers=frozenset(),
    biased_choice=True,
)
"""Defaults for keys that published files may omit."""


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    types = fields.layer_types(config.num_layers)
    if types is None:
        slides = fields.raw.get("sliding_window") is not None
        first = fields.count("max_window_layers", default=62) if slides else config.num_layers
        types = tuple(
            "full_attention" if layer < first else "sliding_attention"
            for layer in range(config.num_layers)
        )
    moe = grouped_experts(fields, config.num_layers, _EXPERTS, usual_dense=0)
    return replace(config, qk_norm=True, windows=windows_of_types(fields, types), moe=moe)


FAMILY = Family(
    _configure,
    {"sliding_window": 4096},
    aliases=(("n_routed_experts", "num_experts"),),
)
