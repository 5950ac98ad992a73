"""Layers of Trinity (AFMoE); see families/afmoe.py."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.experts import experts_or_dense, load_group_routed
from kvmesh.engine.norm_orders import SandwichLayer
from kvmesh.engine.weights import LayerWeights


def load_layer(weights: LayerWeights, config: ModelConfig) -> SandwichLayer:
    """See `LoadLayer`."""
    hidden = config.hidden_size

    def norm(name: str) -> Tensor:
        return weights.vector(f"{name}_layernorm.weight", hidden)

    values = config.num_heads * config.head_dim
    gate = weights.linear("self_attn.gate_proj.weight", values, hidden)
    return SandwichLayer(
        input_norm=norm("input"),
        mixer=replace(load_attention(weights, config), gate=gate),
        post_mixer_norm=norm("post_attention"),
        pre_mlp_norm=norm("pre_mlp"),
        mlp=experts_or_dense(weights, config, load_group_routed),
        post_mlp_norm=norm("post_mlp"),
        eps=config.rms_norm_eps,
    )
