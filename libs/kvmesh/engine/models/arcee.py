"""Layers of Arcee (AFM-4.5B); see families/arcee.py."""

from __future__ import annotations

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layers import MixerLayer
from kvmesh.engine.plain_mlp import load_plain_mlp
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import reference


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    mlp = load_plain_mlp(weights, config, reference.squared_relu)
    return load_pre_norm_layer(weights, config, mlp)
