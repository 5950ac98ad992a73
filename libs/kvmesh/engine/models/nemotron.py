"""Layers of Nemotron-4 and Minitron; see families/nemotron.py."""

from __future__ import annotations

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.nemotron import NORM_OFFSET
from kvmesh.engine.layer_norms import SerialLayer, load_serial_layer
from kvmesh.engine.plain_mlp import load_plain_mlp
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import reference


def load_layer(weights: LayerWeights, config: ModelConfig) -> SerialLayer:
    """See `LoadLayer`."""
    mlp = load_plain_mlp(weights, config, reference.squared_relu)
    attention = load_attention(weights, config)
    return load_serial_layer(weights, config, attention, mlp, offset=NORM_OFFSET)
