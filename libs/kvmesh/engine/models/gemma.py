"""Gemma, the first version: Llama with scaled embeddings, gelu, and norms stored off by one."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import DENSE_MLP, MixerLayer, load_gated_mlp, load_mixer_layer
from kvmesh.engine.models.family import Family
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import reference

# Weights of norms are stored as their difference from one.
_NORM_OFFSET = 1.0


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, embedding_scale=config.hidden_size**0.5)


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    shape = config.hidden_size, config.intermediate_size
    mlp = load_gated_mlp(weights, DENSE_MLP, *shape, reference.gelu_and_mul)
    attention = load_attention(weights, config)
    return load_mixer_layer(weights, config, attention, mlp, norm_offset=_NORM_OFFSET)


FAMILY = Family(
    _configure,
    _load_layer,
    {"head_dim": 256, "tie_word_embeddings": True},
    # The older name, which means the approximation in this family.
    activations=("gelu_pytorch_tanh", "gelu"),
    rounds_embedding_scale=True,
    norm_offset=_NORM_OFFSET,
)
