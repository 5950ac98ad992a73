"""Layers of Phi-3 and Phi-4; see families/phi3.py."""

from __future__ import annotations

from torch import Tensor

from kvmesh.engine.attention import SelfAttention, rotated_halves
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layers import MixerLayer, load_joined_mlp, load_mixer_layer
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels.heads import HeadSpec
from kvmesh.kernels.linear import make_linear


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    hidden, head_dim = config.hidden_size, config.head_dim
    values = config.num_heads * head_dim
    attention = SelfAttention(
        qkv=make_linear(_projection(weights, config)),
        output=weights.linear("self_attn.o_proj.weight", hidden, values),
        spec=HeadSpec(scale=config.attention_scale, window=config.windows[weights.layer]),
        place=weights.place,
        head_dim=head_dim,
    )
    return load_mixer_layer(weights, config, attention, load_joined_mlp(weights, config))


def _projection(weights: LayerWeights, config: ModelConfig) -> Tensor:
    """Returns the weights of queries, keys and values, with rotated pairs half a head apart."""
    head_dim, rotated = config.head_dim, config.num_heads + config.num_kv_heads
    rows = (rotated + config.num_kv_heads) * head_dim
    weight = weights.stacked([("self_attn.qkv_proj.weight", rows)], config.hidden_size)
    if config.rotary_dim:
        heads = weight.view(-1, head_dim, config.hidden_size)
        heads[:rotated] = heads[:rotated, rotated_halves(head_dim, config.rotary_dim)]
    return weight
