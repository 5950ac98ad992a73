"""dots.llm1: attention as in Qwen3, experts as in DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.experts import experts_or_dense, load_group_routed
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import MixerLayer
from kvmesh.engine.models.family import Family, grouped_experts, windows_of_types
from kvmesh.engine.weights import LayerWeights

_EXPERTS = MoeConfig(
    num_experts=128,
    top_k=6,
    intermediate_size=1408,
    normalize=False,
    sparse_layers=frozenset(),
    biased_choice=True,
)
"""What the published files may leave out."""


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


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    mlp = experts_or_dense(weights, config, load_group_routed)
    return load_pre_norm_layer(weights, config, mlp)


FAMILY = Family(
    _configure,
    _load_layer,
    {"sliding_window": 4096},
    aliases=(("n_routed_experts", "num_experts"),),
)
