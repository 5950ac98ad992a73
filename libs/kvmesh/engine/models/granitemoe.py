"""Layers of Granite 3 with experts in all layers; see families/granitemoe.py."""

from __future__ import annotations

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.experts import load_softmax_routed
from kvmesh.engine.layers import MixerLayer
from kvmesh.engine.weights import LayerWeights


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    return load_pre_norm_layer(weights, config, load_softmax_routed(weights, config))
