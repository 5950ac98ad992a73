"""Layers of StarCoder2; see families/starcoder2.py."""

from __future__ import annotations

from functools import partial

from torch.nn import functional

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layer_norms import SerialLayer, load_serial_layer
from kvmesh.engine.plain_mlp import load_plain_mlp
from kvmesh.engine.weights import LayerWeights


def load_layer(weights: LayerWeights, config: ModelConfig) -> SerialLayer:
    """See `LoadLayer`."""
    mlp = load_plain_mlp(weights, config, partial(functional.gelu, approximate="tanh"))
    return load_serial_layer(weights, config, load_attention(weights, config), mlp)
