"""Gemma, the first version: Llama with scaled embeddings, gelu, and norms stored off by one."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields

# Norm weights are stored as their difference from one.
NORM_OFFSET = 1.0


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, embedding_scale=config.hidden_size**0.5)


FAMILY = Family(
    _configure,
    {"head_dim": 256, "tie_word_embeddings": True},
    # "gelu" is the older name, which means the tanh approximation in this family.
    activations=("gelu_pytorch_tanh", "gelu"),
    rounds_embedding_scale=True,
    norm_offset=NORM_OFFSET,
)
