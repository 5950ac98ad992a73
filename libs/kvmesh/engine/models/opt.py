"""Layers of OPT; see families/opt.py."""

from __future__ import annotations

from torch.nn import functional

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layer_norms import SerialLayer, load_serial_layer
from kvmesh.engine.plain_mlp import load_plain_mlp
from kvmesh.engine.weights import LayerWeights


def load_layer(weights: LayerWeights, config: ModelConfig) -> SerialLayer:
    """See `LoadLayer`."""
    mlp = load_plain_mlp(weights, config, functional.relu)
    return load_serial_layer(weights, config, load_attention(weights, config), mlp)
