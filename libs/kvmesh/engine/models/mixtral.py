"""Mixtral: Mistral with experts in all layers."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.experts import W1_W3_W2, load_softmax_routed
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import MixerLayer
from kvmesh.engine.models.family import Family, uniform_window
from kvmesh.engine.weights import LayerWeights


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    moe = MoeConfig(
        num_experts=fields.number("num_local_experts", int, default=8),
        top_k=fields.number("num_experts_per_tok", int, default=2),
        intermediate_size=config.intermediate_size,
        normalize=True,
        sparse_layers=frozenset(range(config.num_layers)),
    )
    windows = uniform_window(fields, config)
    return replace(config, windows=windows, moe=moe, qkv_bias=False, output_bias=False)


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    mlp = load_softmax_routed(weights, config, "block_sparse_moe", W1_W3_W2)
    return load_pre_norm_layer(weights, config, mlp)


FAMILY = Family(_configure, _load_layer, {"rms_norm_eps": 1e-5}, rope_theta=1e6)
