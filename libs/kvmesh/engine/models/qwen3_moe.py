"""Qwen3-MoE: Qwen3 with experts in most layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import MixerLayer, load_gated_mlp, load_pre_norm_layer, make_sparse_mlp
from kvmesh.engine.models.family import Family
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import layer_ops


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    if fields.flag("use_sliding_window"):
        raise CheckpointError(f"{fields.origin}: use_sliding_window is not supported in qwen3_moe")
    # transformers writes the number under its own name, the published files under another.
    key = "num_experts" if "num_experts" in fields.raw else "num_local_experts"
    dense = frozenset(fields.raw.get("mlp_only_layers") or ())
    every = fields.number("decoder_sparse_step", int, default=1)
    sparse = {layer for layer in range(config.num_layers) if (layer + 1) % every == 0}
    moe = MoeConfig(
        num_experts=fields.number(key, int, default=128),
        top_k=fields.number("num_experts_per_tok", int, default=8),
        intermediate_size=fields.number("moe_intermediate_size", int),
        normalize=fields.flag("norm_topk_prob"),
        sparse_layers=frozenset(sparse - dense),
    )
    return replace(config, qk_norm=True, moe=moe)


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    if weights.layer not in moe.sparse_layers:
        return load_pre_norm_layer(weights, config)
    experts = []
    for expert in range(moe.num_experts):
        prefix = f"mlp.experts.{expert}"
        names = (
            f"{prefix}.gate_proj.weight",
            f"{prefix}.up_proj.weight",
            f"{prefix}.down_proj.weight",
        )
        experts.append(load_gated_mlp(weights, names, hidden, moe.intermediate_size))
    mlp = make_sparse_mlp(
        weights.linear("mlp.gate.weight", moe.num_experts, hidden),
        partial(layer_ops.route, top_k=moe.top_k, normalize=moe.normalize),
        experts,
    )
    return load_pre_norm_layer(weights, config, mlp)


FAMILY = Family(_configure, _load_layer)
