"""Layers of Kimi Linear; see families/kimi_linear.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import LinearConfig, ModelConfig
from kvmesh.engine.experts import W1_W3_W2, load_group_routed, load_mlp
from kvmesh.engine.kda import load_kda
from kvmesh.engine.latent import load_latent_attention
from kvmesh.engine.layers import Mixer, MixerLayer, load_mixer_layer
from kvmesh.engine.linear_attention import DeltaAttention, DeltaInputs
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels.linear import Linear, make_linear


@dataclass(frozen=True, slots=True)
class _Projection:
    """Inputs of the delta rule.

    Attributes:
        main: projection to queries, keys, values, betas, and inputs of `forget` and `gate`.
        forget: projection to the decay of every channel, before its activation.
        gate: projection to the gate of the output.
        rate: [heads, 1] fp32, decay rate of a state.
        bias: [heads, key_dim] fp32, bias of the decay.
    """

    main: Linear
    forget: Linear
    gate: Linear
    rate: Tensor
    bias: Tensor
    shape: LinearConfig

    def __call__(self, h: Tensor) -> DeltaInputs:
        shape = self.shape
        heads, dim = shape.num_value_heads, shape.key_dim
        sizes = [shape.conv_channels, heads, dim, dim]
        mixed, share, forget, gate = torch.split(self.main(h), sizes, dim=1)
        time = self.forget(forget.contiguous()).float().view(len(h), heads, dim)
        return DeltaInputs(
            mixed=mixed,
            decay=-self.rate * functional.softplus(time + self.bias),
            beta=torch.sigmoid(share.float()),
            gate=self.gate(gate.contiguous()).view(len(h), heads, dim),
        )


def _load_delta(weights: LayerWeights, config: ModelConfig) -> DeltaAttention:
    shape, hidden = config.linear, config.hidden_size
    assert shape is not None
    heads, dim = shape.num_value_heads, shape.key_dim
    values = heads * dim
    main = [(f"self_attn.{name}_proj.weight", values) for name in "qkv"]
    main.append(("self_attn.b_proj.weight", heads))
    main += [(f"self_attn.{name}_a_proj.weight", dim) for name in "fg"]
    project = _Projection(
        make_linear(weights.stacked(main, hidden)),
        weights.linear("self_attn.f_b_proj.weight", values, dim),
        weights.linear("self_attn.g_b_proj.weight", values, dim),
        weights.exact("self_attn.A_log", (1, 1, heads, 1)).view(heads, 1).exp(),
        weights.exact("self_attn.dt_bias", (values,)).view(heads, dim),
        shape,
    )
    return load_kda(weights, config, project)


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    moe = config.moe
    assert moe is not None
    mixer: Mixer
    if config.is_linear(weights.layer):
        mixer = _load_delta(weights, config)
    else:
        mixer = load_latent_attention(weights, config, rotates=False)
    if weights.layer in moe.sparse_layers:
        mlp = load_group_routed(weights, config, "block_sparse_moe", W1_W3_W2)
    else:
        # transformers writes dense layers under the name of sparse ones.
        prefix = "mlp" if weights.has("mlp.gate_proj.weight") else "block_sparse_moe"
        mlp = load_mlp(weights, prefix, config.hidden_size, config.intermediate_size)
    return load_mixer_layer(weights, config, mixer, mlp)
