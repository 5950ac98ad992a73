"""Layers of Qwen1.5-MoE and Qwen2-MoE; see families/qwen2_moe.py."""

from __future__ import annotations

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.experts import experts_or_dense, load_gate_shared
from kvmesh.engine.layers import MixerLayer
from kvmesh.engine.weights import LayerWeights


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    mlp = experts_or_dense(weights, config, load_gate_shared)
    return load_pre_norm_layer(weights, config, mlp)
