"""Layers of GPT-J; see families/gptj.py."""

from __future__ import annotations

from functools import partial

from torch.nn import functional

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layer_norms import ParallelLayer, load_layer_norm
from kvmesh.engine.plain_mlp import load_plain_mlp
from kvmesh.engine.weights import LayerWeights


def load_layer(weights: LayerWeights, config: ModelConfig) -> ParallelLayer:
    """See `LoadLayer`."""
    norm = load_layer_norm(weights, config, "input_layernorm")
    mlp = load_plain_mlp(weights, config, partial(functional.gelu, approximate="tanh"))
    return ParallelLayer(norm, load_attention(weights, config), None, mlp)
