"""Gemma 3: windows in most layers with their own rope, norms before and after each part.

Checkpoints that also see pictures are read for text only.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvmesh.core.decoder_keys import GEMMA3_DEFAULTS
from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig, RopeConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import DENSE_MLP, load_gated_mlp
from kvmesh.engine.models.family import (
    SEEING_PREFIX,
    Family,
    rope_of_windows,
    types_or_each_nth,
    windows_of_types,
)
from kvmesh.engine.norm_orders import SandwichLayer
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import reference

# Weights of norms are stored as their difference from one.
NORM_OFFSET = 1.0


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    types = types_or_each_nth(fields, config.num_layers, 6)
    # Older files stretch the global rope only.
    older = RopeConfig(fields.number("rope_local_base_freq", float, default=10000.0))
    scalar = fields.number("query_pre_attn_scalar", float, default=256.0)
    return replace(
        config,
        qk_norm=True,
        windows=windows_of_types(fields, types),
        local_rope=rope_of_windows(fields, 10000.0, older),
        attention_scale=scalar**-0.5,
        embedding_scale=config.hidden_size**0.5,
    )


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


FAMILY = Family(
    _configure,
    load_layer,
    {**GEMMA3_DEFAULTS, "tie_word_embeddings": True, "sliding_window": 4096},
    rope_theta=1e6,
    activations=("gelu_pytorch_tanh",),
    rounds_embedding_scale=True,
    norm_offset=NORM_OFFSET,
)
SEEING = replace(FAMILY, weight_prefix=SEEING_PREFIX, decoders={"gemma3_text": {}})
