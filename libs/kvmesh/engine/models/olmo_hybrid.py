"""Layers of OLMo Hybrid; see families/olmo_hybrid.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import LinearConfig, ModelConfig
from kvmesh.engine.gated_delta import load_gated_delta
from kvmesh.engine.layers import DENSE_MLP, MixerLayer, load_gated_mlp
from kvmesh.engine.linear_attention import DeltaAttention
from kvmesh.engine.norm_orders import PostNormLayer
from kvmesh.engine.weights import LayerWeights

# Epsilon of the output's norm, whatever the file says of other norms.
_OUTPUT_EPS = 1e-5


def _norm(weights: LayerWeights, config: ModelConfig, *names: str) -> Tensor:
    """Reads a norm under the first of these names that the files have, or the last."""
    name = next((name for name in names if weights.has(f"{name}.weight")), names[-1])
    return weights.vector(f"{name}.weight", config.hidden_size)


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer | PostNormLayer:
    """See `LoadLayer`."""
    mlp = load_gated_mlp(weights, DENSE_MLP, config.hidden_size, config.intermediate_size)
    second = _norm(weights, config, "feedforward_layer_norm", "post_attention_layernorm")
    if not config.is_linear(weights.layer):
        return PostNormLayer(
            mixer=load_attention(weights, config),
            post_mixer_norm=second,
            mlp=mlp,
            post_mlp_norm=_norm(weights, config, "post_feedforward_layernorm"),
            eps=config.rms_norm_eps,
        )
    return MixerLayer(
        input_norm=_norm(weights, config, "attention_layer_norm", "input_layernorm"),
        mixer=_load_delta(weights, config),
        post_norm=second,
        mlp=mlp,
        eps=config.rms_norm_eps,
    )


def _load_delta(weights: LayerWeights, config: ModelConfig) -> DeltaAttention:
    shape, hidden = config.linear, config.hidden_size
    assert shape is not None
    heads = shape.num_value_heads
    keys, values = shape.num_key_heads * shape.key_dim, heads * shape.value_dim
    sizes = {"q": keys, "k": keys, "v": values, "g": values}
    main = [(f"linear_attn.{name}_proj.weight", rows) for name, rows in sizes.items()]
    rates = [("linear_attn.b_proj.weight", heads), ("linear_attn.a_proj.weight", heads)]
    return load_gated_delta(
        weights,
        config,
        weights.stacked(main, hidden),
        weights.stacked(rates, hidden),
        taps=_load_taps(weights, shape),
        eps=_OUTPUT_EPS,
        largest_share=2.0 if config.double_shares else 1.0,
    )


def _load_taps(weights: LayerWeights, shape: LinearConfig) -> Tensor | None:
    """Reads the convolution from three tensors; None if it is one tensor.

    Files of transformers split it into three equal parts, whatever sizes queries, keys and values
    have.
    """
    names = [f"linear_attn.{name}_conv1d.weight" for name in "qkv"]
    if not weights.has(names[0]):
        return None
    shapes = [weights.shape(name) for name in names]
    fitting = all(each[1:] == (1, shape.conv_kernel) for each in shapes)
    if not fitting or sum(each[0] for each in shapes) != shape.conv_channels:
        raise CheckpointError(
            f"{', '.join(names)} of layer {weights.layer} have the shapes {shapes}, config.json "
            f"says {(shape.conv_channels, 1, shape.conv_kernel)} together"
        )
    return torch.cat([weights.tensor(*each) for each in zip(names, shapes, strict=True)])
