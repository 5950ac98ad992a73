"""Layers of GPT-NeoX and Pythia; see families/gpt_neox.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.attention import SelfAttention, rotated_halves
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layer_norms import ParallelLayer, SerialLayer, load_layer_norm, load_serial_layer
from kvmesh.engine.plain_mlp import load_plain_mlp
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels.heads import HeadSpec
from kvmesh.kernels.linear import make_linear


def _load_attention(weights: LayerWeights, config: ModelConfig) -> SelfAttention:
    hidden, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
    order = rotated_halves(head_dim, config.rotary_dim)

    def by_kind(rows: Tensor) -> Tensor:
        """Reorders rows from head after head to all queries, all keys, all values."""
        q, k, v = rows.view(heads, 3, head_dim, -1).unbind(1)
        return torch.cat([q[:, order], k[:, order], v]).reshape(rows.shape)

    bias = None
    output_bias = None
    if config.qkv_bias:
        bias = by_kind(weights.vector("attention.query_key_value.bias", 3 * hidden))
        output_bias = weights.vector("self_attn.o_proj.bias", hidden)
    joined = weights.tensor("attention.query_key_value.weight", (3 * hidden, hidden))
    return SelfAttention(
        qkv=make_linear(by_kind(joined), bias),
        output=weights.linear("self_attn.o_proj.weight", hidden, hidden, output_bias),
        spec=HeadSpec(scale=config.attention_scale),
        place=weights.place,
        head_dim=head_dim,
    )


def load_layer(weights: LayerWeights, config: ModelConfig) -> SerialLayer | ParallelLayer:
    """See `LoadLayer`."""
    attention = _load_attention(weights, config)
    mlp = load_plain_mlp(weights, config, functional.gelu)
    if not config.parallel:
        return load_serial_layer(weights, config, attention, mlp)
    input_norm = load_layer_norm(weights, config, "input_layernorm")
    mlp_norm = load_layer_norm(weights, config, "post_attention_layernorm")
    return ParallelLayer(input_norm, attention, mlp_norm, mlp)
