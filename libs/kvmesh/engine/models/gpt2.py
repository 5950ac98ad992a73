"""Layers of GPT-2; see families/gpt2.py."""

from __future__ import annotations

from functools import partial

from torch.nn import functional

from kvmesh.engine.attention import SelfAttention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layer_norms import SerialLayer, load_serial_layer
from kvmesh.engine.plain_mlp import PlainMlp
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels.heads import HeadSpec
from kvmesh.kernels.linear import Linear, make_linear


def _transposed(weights: LayerWeights, name: str, rows: int, columns: int) -> Linear:
    weight = weights.tensor(f"{name}.weight", (columns, rows)).T.contiguous()
    return make_linear(weight, weights.vector(f"{name}.bias", rows))


def load_layer(weights: LayerWeights, config: ModelConfig) -> SerialLayer:
    """See `LoadLayer`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = SelfAttention(
        qkv=_transposed(weights, "attn.c_attn", 3 * hidden, hidden),
        output=_transposed(weights, "attn.c_proj", hidden, hidden),
        spec=HeadSpec(scale=config.attention_scale),
        place=weights.place,
        head_dim=config.head_dim,
        rotation=config.rotation(weights.layer),
    )
    mlp = PlainMlp(
        _transposed(weights, "mlp.c_fc", inner, hidden),
        _transposed(weights, "mlp.c_proj", hidden, inner),
        partial(functional.gelu, approximate="tanh"),
    )
    return load_serial_layer(weights, config, attention, mlp)
