"""Falcon 7B, 40B, 180B and Falcon 2: norms that take the mean out, attention and an MLP without a
gate side by side behind one of them or one each; queries, keys and values are one in the files.
Not those with ALiBi (Falcon-RW).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.attention import SelfAttention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layer_norms import (
    ParallelLayer,
    SerialLayer,
    load_layer_norm,
    load_serial_layer,
)
from kvmesh.engine.models.family import Family
from kvmesh.engine.plain_mlp import load_plain_mlp
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels.heads import HeadSpec
from kvmesh.kernels.linear import make_linear


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("activation", "gelu")
    fields.only("alibi", False)
    fields.only("head_dim", config.hidden_size // config.num_heads)
    bias, is_newer = fields.flag("bias"), fields.flag("new_decoder_architecture")
    if is_newer:
        fields.only("parallel_attn", True)
    fields.only("num_ln_in_parallel_attn", *((1, 2) if is_newer else (1,)))
    norms = fields.number("num_ln_in_parallel_attn", int, default=2 if is_newer else 1)
    return replace(
        config,
        intermediate_size=fields.number("ffn_hidden_size", int, default=4 * config.hidden_size),
        num_kv_heads=_kv_heads(fields, config, is_newer=is_newer),
        layer_norm=True,
        parallel=fields.flag("parallel_attn", default=True),
        norm_each=norms == 2,
        gated_mlp=False,
        mlp_bias=bias,
        qkv_bias=bias,
        output_bias=bias,
    )


def _kv_heads(fields: Fields, config: ModelConfig, *, is_newer: bool) -> int:
    heads = config.num_heads
    if not is_newer and fields.flag("multi_query", default=True):
        return 1
    kv_heads = fields.number("num_kv_heads", int, default=heads)
    if heads % kv_heads or (not is_newer and kv_heads != heads):
        raise CheckpointError(f"{fields.origin}: num_kv_heads {kv_heads} of {heads} heads")
    return kv_heads


def _by_kind(rows: Tensor, config: ModelConfig) -> Tensor:
    """Rows of the heads that share a key and a value, their key, their value, and so on for all,
    as those of all queries, all keys and all values.
    """
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


def _load_layer(weights: LayerWeights, config: ModelConfig) -> SerialLayer | ParallelLayer:
    attention = _load_attention(weights, config)
    mlp = load_plain_mlp(weights, config, functional.gelu)
    if not config.parallel:
        return load_serial_layer(weights, config, attention, mlp)
    input_norm = load_layer_norm(
        weights, config, "ln_attn" if config.norm_each else "input_layernorm"
    )
    mlp_norm = load_layer_norm(weights, config, "ln_mlp") if config.norm_each else None
    return ParallelLayer(input_norm, attention, mlp_norm, mlp)


FAMILY = Family(
    _configure,
    _load_layer,
    {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    aliases=(("layer_norm_epsilon", "rms_norm_eps"), ("n_embed", "hidden_size")),
    weight_prefix="transformer",
    tensor_names=(
        (".layers.", ".h."),
        ("transformer.embed_tokens.", "transformer.word_embeddings."),
        ("transformer.norm.", "transformer.ln_f."),
        (".mlp.up_proj.", ".mlp.dense_h_to_4h."),
        (".mlp.down_proj.", ".mlp.dense_4h_to_h."),
    ),
)
