"""Layers of StableLM; see families/stablelm.py."""

from __future__ import annotations

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layer_norms import ParallelLayer, SerialLayer, load_layer_norm, load_serial_layer
from kvmesh.engine.layers import DENSE_MLP, load_gated_mlp
from kvmesh.engine.weights import LayerWeights


def load_layer(weights: LayerWeights, config: ModelConfig) -> SerialLayer | ParallelLayer:
    """See `LoadLayer`."""
    attention = load_attention(weights, config)
    mlp = load_gated_mlp(weights, DENSE_MLP, config.hidden_size, config.intermediate_size)
    if not config.parallel:
        return load_serial_layer(weights, config, attention, mlp)
    norm = load_layer_norm(weights, config, "input_layernorm")
    return ParallelLayer(norm, attention, None, mlp)
