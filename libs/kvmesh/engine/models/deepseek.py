"""Layers of DeepSeek V2 and V3; see families/deepseek.py."""

from __future__ import annotations

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.experts import experts_or_dense, load_group_routed
from kvmesh.engine.latent import load_latent_attention
from kvmesh.engine.layers import MixerLayer, load_mixer_layer
from kvmesh.engine.weights import LayerWeights


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """Reads a layer with latent attention.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    mlp = experts_or_dense(weights, config, load_group_routed)
    return load_mixer_layer(weights, config, load_latent_attention(weights, config), mlp)
