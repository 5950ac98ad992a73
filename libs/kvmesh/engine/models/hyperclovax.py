"""Layers of HyperCLOVA X; see families/hyperclovax.py."""

from __future__ import annotations

from torch import Tensor

from kvmesh.engine.attention import load_attention, load_pre_norm_layer
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layers import DENSE_MLP, Layer, load_gated_mlp
from kvmesh.engine.norm_orders import SandwichLayer
from kvmesh.engine.weights import LayerWeights


def load_layer(weights: LayerWeights, config: ModelConfig) -> Layer:
    """See `LoadLayer`."""
    if not config.residual_factors:
        return load_pre_norm_layer(weights, config)
    hidden, (_, factor) = config.hidden_size, config.residual_factors[0]

    def scaled_norm(name: str) -> Tensor:
        return (weights.exact(f"{name}.weight", (hidden,)) * factor).to(weights.dtype)

    return SandwichLayer(
        input_norm=weights.vector("input_layernorm.weight", hidden),
        mixer=load_attention(weights, config),
        post_mixer_norm=scaled_norm("post_norm1"),
        pre_mlp_norm=weights.vector("post_attention_layernorm.weight", hidden),
        mlp=load_gated_mlp(weights, DENSE_MLP, hidden, config.intermediate_size),
        post_mlp_norm=scaled_norm("post_norm2"),
        eps=config.rms_norm_eps,
    )
