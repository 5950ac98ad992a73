"""Layers of Gemma 3; see families/gemma3.py."""

from __future__ import annotations

import torch

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.gemma3 import NORM_OFFSET
from kvmesh.engine.layers import DENSE_MLP, load_gated_mlp
from kvmesh.engine.norm_orders import SandwichLayer
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import reference


def load_layer(weights: LayerWeights, config: ModelConfig) -> SandwichLayer:
    """Reads a layer of Gemma 2 or 3.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    hidden = config.hidden_size

    def norm(name: str) -> torch.Tensor:
        return weights.vector(f"{name}_layernorm.weight", hidden, NORM_OFFSET)

    return SandwichLayer(
        input_norm=norm("input"),
        mixer=load_attention(weights, config, norm_offset=NORM_OFFSET),
        post_mixer_norm=norm("post_attention"),
        pre_mlp_norm=norm("pre_feedforward"),
        mlp=load_gated_mlp(
            weights, DENSE_MLP, hidden, config.intermediate_size, reference.gelu_and_mul
        ),
        post_mlp_norm=norm("post_feedforward"),
        eps=config.rms_norm_eps,
    )
