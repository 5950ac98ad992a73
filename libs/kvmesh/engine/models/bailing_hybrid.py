"""Layers of Bailing hybrid; see families/bailing_hybrid.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import LinearConfig, ModelConfig
from kvmesh.engine.experts import experts_or_dense, load_group_routed
from kvmesh.engine.kda import load_kda
from kvmesh.engine.latent import load_latent_attention
from kvmesh.engine.layers import Mixer, MixerLayer, load_mixer_layer
from kvmesh.engine.linear_attention import DeltaInputs
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels.linear import Linear, make_linear


@dataclass(frozen=True, slots=True)
class _Projection:
    """Inputs of the delta rule.

    Attributes:
        main: projection to queries, keys, values, betas, decays and gates.
        rate: [heads, 1] fp32, decay rate of a state.
        bias: [heads, key_dim] fp32, bias of the decay.
        bound: logarithm of the fastest decay; 0 for no bound.
    """

    main: Linear
    rate: Tensor
    bias: Tensor
    bound: float
    shape: LinearConfig

    def __call__(self, h: Tensor) -> DeltaInputs:
        shape = self.shape
        heads, dim = shape.num_value_heads, shape.key_dim
        sizes = [shape.conv_channels, heads, heads * dim, heads * dim]
        mixed, share, time, gate = torch.split(self.main(h), sizes, dim=1)
        time = time.float().view(len(h), heads, dim) + self.bias
        if self.bound:
            decay = self.bound * torch.sigmoid(self.rate * time)
        else:
            decay = -self.rate * functional.softplus(time)
        return DeltaInputs(
            mixed=mixed,
            decay=decay,
            beta=torch.sigmoid(share.float()),
            gate=gate.view(len(h), heads, dim),
        )


def _project(weights: LayerWeights, config: ModelConfig) -> _Projection:
    shape = config.linear
    assert shape is not None
    heads, dim = shape.num_value_heads, shape.key_dim
    parts = [(f"self_attn.{name}_proj.weight", heads * dim) for name in "qkv"]
    parts.append(("self_attn.b_proj.weight", heads))
    parts += [(f"self_attn.{name}_proj.weight", heads * dim) for name in "fg"]
    return _Projection(
        make_linear(weights.stacked(parts, config.hidden_size)),
        weights.exact("self_attn.A_log", (heads,)).view(heads, 1).exp(),
        weights.exact("self_attn.dt_bias", (heads * dim,)).view(heads, dim),
        config.decay_bound,
        shape,
    )


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    mixer: Mixer
    if config.is_linear(weights.layer):
        mixer = load_kda(weights, config, _project(weights, config))
    else:
        gate = weights.linear("self_attn.g_proj.weight", config.num_heads, config.hidden_size)
        mixer = load_latent_attention(weights, config, gate=gate)
    mlp = experts_or_dense(weights, config, load_group_routed)
    return load_mixer_layer(weights, config, mixer, mlp)
