"""OLMo Hybrid: the gated delta rule in most layers, which may take back twice what a state holds;
in the others OLMo 2's attention, not rotated unless the file says how.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import LinearConfig, ModelConfig
from kvmesh.engine.gated_delta import load_gated_delta
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import DENSE_MLP, MixerLayer, load_gated_mlp
from kvmesh.engine.linear_attention import DeltaAttention
from kvmesh.engine.models.family import Family
from kvmesh.engine.norm_orders import PostNormLayer
from kvmesh.engine.rope_fields import rope_parameters
from kvmesh.engine.weights import LayerWeights

# Of the output's norm, whatever the file says of the others.
_OUTPUT_EPS = 1e-5


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    heads = fields.number("linear_num_key_heads", int, default=config.num_heads)
    usual_size = max(1, int(0.75 * config.hidden_size / heads))
    key_dim = fields.number("linear_key_head_dim", int, default=usual_size)
    linear = _linear_layers(fields, config.num_layers)
    if not linear:
        raise CheckpointError(f"{fields.origin}: layer_types without linear_attention")
    # Published files have a base of null where nothing is rotated.
    theta = rope_parameters(fields).get("rope_theta", fields.raw.get("rope_theta", 1e4))
    layers = range(config.num_layers)
    return replace(
        config,
        wide_qk_norm=True,
        unrotated=frozenset(layers) if theta is None else frozenset(),
        double_shares=fields.flag("linear_allow_neg_eigval", default=True),
        linear=LinearConfig(
            layers=linear,
            num_key_heads=heads,
            num_value_heads=fields.number("linear_num_value_heads", int, default=config.num_heads),
            key_dim=key_dim,
            value_dim=fields.number("linear_value_head_dim", int, default=2 * key_dim),
            conv_kernel=fields.number("linear_conv_kernel_dim", int, default=4),
        ),
    )


def _linear_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    types = fields.layer_types(num_layers)
    if types is not None:
        return frozenset(i for i, kind in enumerate(types) if kind == "linear_attention")
    full = set(range(3, num_layers, 4)) or {num_layers - 1}
    return frozenset(range(num_layers)) - full


def _norm(weights: LayerWeights, config: ModelConfig, *names: str) -> Tensor:
    """Under the first of these names that the files have, or the last."""
    name = next((name for name in names if weights.has(f"{name}.weight")), names[-1])
    return weights.vector(f"{name}.weight", config.hidden_size)


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer | PostNormLayer:
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
    """The convolution where it is three tensors, None where it is one.

    Files of transformers cut it in three equal parts, whatever queries, keys and values need.
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


FAMILY = Family(
    _configure,
    _load_layer,
    {"intermediate_size": 11008, "max_position_embeddings": 65536},
    tensor_names=(
        (".linear_attn.norm.", ".linear_attn.o_norm."),
        (".linear_attn.out_proj.", ".linear_attn.o_proj."),
    ),
)
