"""Qwen3-Next: gated delta rule in most layers, gated attention in the others, shared experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import LinearConfig, ModelConfig, MoeConfig
from kvmesh.engine.experts import SharedMlp, load_experts, load_mlp
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import (
    DENSE_MLP,
    Mixer,
    MixerLayer,
    Mlp,
    load_attention,
    load_gated_mlp,
    load_mixer_layer,
    make_sparse_mlp,
)
from kvmesh.engine.linear_attention import DeltaAttention, DeltaInputs, load_taps
from kvmesh.engine.models.family import Family
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import layer_ops
from kvmesh.kernels.linear import Linear, make_linear

# Weights of norms are stored as their difference from one, but for that of the delta rule.
_NORM_OFFSET = 1.0


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    types = fields.layer_types(config.num_layers)
    if types is None:
        every = fields.number("full_attention_interval", int, default=4)
        types = tuple(
            "linear_attention" if (layer + 1) % every else "full_attention"
            for layer in range(config.num_layers)
        )
    linear = LinearConfig(
        layers=frozenset(i for i, kind in enumerate(types) if kind == "linear_attention"),
        num_key_heads=fields.number("linear_num_key_heads", int, default=16),
        num_value_heads=fields.number("linear_num_value_heads", int, default=32),
        key_dim=fields.number("linear_key_head_dim", int, default=128),
        value_dim=fields.number("linear_value_head_dim", int, default=128),
        conv_kernel=fields.number("linear_conv_kernel_dim", int, default=4),
    )
    dense = frozenset(fields.raw.get("mlp_only_layers") or ())
    every = fields.number("decoder_sparse_step", int, default=1)
    sparse = {layer for layer in range(config.num_layers) if (layer + 1) % every == 0}
    moe = MoeConfig(
        num_experts=fields.number("num_experts", int, default=512),
        top_k=fields.number("num_experts_per_tok", int, default=10),
        intermediate_size=fields.number("moe_intermediate_size", int, default=512),
        normalize=fields.flag("norm_topk_prob", default=True),
        sparse_layers=frozenset(sparse - dense),
        shared_size=fields.number("shared_expert_intermediate_size", int, default=512),
    )
    return replace(
        config,
        qk_norm=True,
        rotary_dim=fields.rotary_dim(config.head_dim, default=0.25),
        linear=linear,
        moe=moe,
    )


@dataclass(frozen=True, slots=True)
class _Projection:
    """Inputs of the delta rule.

    Attributes:
        main: to queries, keys, values and the gate.
        rates: to the share and the time step of each value head.
        rate: [value heads] fp32, how fast a state decays.
        bias: [value heads] fp32, of the time step.
    """

    main: Linear
    rates: Linear
    rate: Tensor
    bias: Tensor
    shape: LinearConfig

    def __call__(self, h: Tensor) -> DeltaInputs:
        shape = self.shape
        values = shape.num_value_heads * shape.value_dim
        mixed, gate = torch.split(self.main(h), [shape.conv_channels, values], dim=1)
        share, time = self.rates(h).float().chunk(2, dim=1)
        decay = -self.rate * functional.softplus(time + self.bias)
        return DeltaInputs(
            mixed=mixed,
            decay=decay.unsqueeze(-1),
            beta=torch.sigmoid(share),
            gate=gate.view(len(h), shape.num_value_heads, shape.value_dim),
        )


def _by_kind(rows: Tensor, sizes: list[int]) -> Tensor:
    """Rows that take turns by key head, [key heads, rows, columns], to all of a kind together."""
    return torch.cat([part.flatten(0, 1) for part in torch.split(rows, sizes, dim=1)])


def _load_delta(weights: LayerWeights, config: ModelConfig) -> DeltaAttention:
    shape, hidden = config.linear, config.hidden_size
    assert shape is not None
    values = shape.num_value_heads // shape.num_key_heads
    per_head = [shape.key_dim, shape.key_dim, values * shape.value_dim, values * shape.value_dim]
    count = shape.num_key_heads
    main = weights.tensor("linear_attn.in_proj_qkvz.weight", (count * sum(per_head), hidden))
    rates = weights.tensor("linear_attn.in_proj_ba.weight", (2 * shape.num_value_heads, hidden))
    heads = shape.num_value_heads
    return DeltaAttention(
        project=_Projection(
            make_linear(_by_kind(main.view(count, -1, hidden), per_head)),
            make_linear(_by_kind(rates.view(count, -1, hidden), [values, values])),
            weights.tensor("linear_attn.A_log", (heads,)).float().exp(),
            weights.tensor("linear_attn.dt_bias", (heads,)).float(),
            shape,
        ),
        taps=load_taps(
            weights.tensor("linear_attn.conv1d.weight", (shape.conv_channels, 1, shape.conv_kernel))
        ),
        norm=weights.vector("linear_attn.norm.weight", shape.value_dim),
        activate=functional.silu,
        output=weights.linear("linear_attn.out_proj.weight", hidden, heads * shape.value_dim),
        place=weights.place,
        shape=shape,
        eps=config.rms_norm_eps,
    )


def _load_mlp(weights: LayerWeights, config: ModelConfig) -> Mlp:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    if weights.layer not in moe.sparse_layers:
        return load_gated_mlp(weights, DENSE_MLP, hidden, config.intermediate_size)
    chosen = make_sparse_mlp(
        weights.linear("mlp.gate.weight", moe.num_experts, hidden),
        partial(layer_ops.route, top_k=moe.top_k, normalize=moe.normalize),
        load_experts(weights, config),
    )
    gate = weights.linear("mlp.shared_expert_gate.weight", 1, hidden)
    return SharedMlp(chosen, load_mlp(weights, "mlp.shared_expert", hidden, moe.shared_size), gate)


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    mixer: Mixer
    if config.is_linear(weights.layer):
        mixer = _load_delta(weights, config)
    else:
        mixer = load_attention(weights, config, norm_offset=_NORM_OFFSET, gated=True)
    mlp = _load_mlp(weights, config)
    return load_mixer_layer(weights, config, mixer, mlp, norm_offset=_NORM_OFFSET)


FAMILY = Family(_configure, _load_layer, head_dim=256, norm_offset=_NORM_OFFSET)
