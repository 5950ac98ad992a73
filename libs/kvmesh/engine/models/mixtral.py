"""Mixtral: Mistral with experts in all layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import MixerLayer, load_gated_mlp, load_pre_norm_layer, make_sparse_mlp
from kvmesh.engine.models.family import Family, uniform_window
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import layer_ops


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
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    experts = []
    for expert in range(moe.num_experts):
        prefix = f"block_sparse_moe.experts.{expert}"
        names = (f"{prefix}.w1.weight", f"{prefix}.w3.weight", f"{prefix}.w2.weight")
        experts.append(load_gated_mlp(weights, names, hidden, moe.intermediate_size))
    mlp = make_sparse_mlp(
        weights.linear("block_sparse_moe.gate.weight", moe.num_experts, hidden),
        partial(layer_ops.route, top_k=moe.top_k, normalize=True),
        experts,
    )
    return load_pre_norm_layer(weights, config, mlp)


FAMILY = Family(_configure, _load_layer, rope_theta=1e6)
