"""Layers of Falcon; see families/falcon.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.attention import SelfAttention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layer_norms import ParallelLayer, SerialLayer, load_layer_norm, load_serial_layer
from kvmesh.engine.plain_mlp import load_plain_mlp
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels.heads import HeadSpec
from kvmesh.kernels.linear import make_linear


def _by_kind(rows: Tensor, config: ModelConfig) -> Tensor:
    """Reorders groups of query heads, key and value to all queries, all keys, all values."""
    shared = config.num_heads // config.num_kv_heads
    groups = rows.view(config.num_kv_heads, shared + 2, config.head_dim, -1)
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return torch.cat([part.reshape(-1, groups.shape[-1]) for part in parts]).reshape(rows.shape)


def _load_attention(weights: LayerWeights, config: ModelConfig) -> SelfAttention:
    hidden = config.hidden_size
    rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    bias = output_bias = None
    if config.qkv_bias:
        bias = _by_kind(weights.vector("self_attention.query_key_value.bias", rows), config)
        output_bias = weights.vector("self_attention.dense.bias", hidden)
    joined = weights.tensor("self_attention.query_key_value.weight", (rows, hidden))
    return SelfAttention(
        qkv=make_linear(_by_kind(joined, config), bias),
        output=weights.linear("self_attention.dense.weight", hidden, hidden, output_bias),
        spec=HeadSpec(scale=config.attention_scale),
        place=weights.place,
        head_dim=config.head_dim,
    )


def load_layer(weights: LayerWeights, config: ModelConfig) -> SerialLayer | ParallelLayer:
    """See `LoadLayer`."""
    attention = _load_attention(weights, config)
    mlp = load_plain_mlp(weights, config, functional.gelu)
    if not config.parallel:
        return load_serial_layer(weights, config, attention, mlp)
    input_norm = load_layer_norm(
        weights, config, "ln_attn" if config.norm_each else "input_layernorm"
    )
    mlp_norm = load_layer_norm(weights, config, "ln_mlp") if config.norm_each else None
    return ParallelLayer(input_norm, attention, mlp_norm, mlp)
