"""Layers of MiniMax-M2; see families/minimax_m2.py."""

from __future__ import annotations

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.experts import W1_W3_W2, load_group_routed
from kvmesh.engine.layers import MixerLayer
from kvmesh.engine.weights import LayerWeights


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    mlp = load_group_routed(weights, config, "block_sparse_moe", W1_W3_W2)
    return load_pre_norm_layer(weights, config, mlp)
