"""Kimi Linear: delta attention with a decay per channel (KDA) in most layers, latent attention
without rotation in the others, experts chosen by sigmoid scores.

Source: Kimi Linear, arXiv 2510.26692.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import LinearConfig, ModelConfig, MoeConfig
from kvmesh.engine.experts import W1_W3_W2, load_group_routed, load_mlp
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.kda import load_kda
from kvmesh.engine.latent import load_latent_attention
from kvmesh.engine.layers import Mixer, MixerLayer, load_mixer_layer
from kvmesh.engine.linear_attention import DeltaAttention, DeltaInputs
from kvmesh.engine.models.family import EXPERT_ALIASES, Family, grouped_experts, latent_shape
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels.linear import Linear, make_linear


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("mla_use_nope", True)
    fields.only("moe_layer_freq", 1)
    fields.only("moe_router_activation_func", "sigmoid")
    latent = latent_shape(fields, interleaved=False)
    return replace(
        config,
        # The head is its own whatever the file says: transformers ties none of this family.
        tie_word_embeddings=False,
        head_dim=latent.rope_dim,
        latent=latent,
        linear=_linear(fields, config.num_layers),
        moe=grouped_experts(fields, config.num_layers, _EXPERTS, usual_dense=1),
        attention_scale=(latent.nope_dim + latent.rope_dim) ** -0.5,
    )


def _linear(fields: Fields, num_layers: int) -> LinearConfig:
    # The published files have a table for this, which counts layers from one.
    table = fields.table("linear_attn_config")
    own = Fields(table, fields.origin)
    types = fields.layer_types(num_layers)
    if types is not None:
        layers = frozenset(i for i, kind in enumerate(types) if kind == "linear_attention")
    elif "kda_layers" in table:
        layers = frozenset(layer - 1 for layer in own.numbers("kda_layers"))
    else:
        layers = frozenset(layer for layer in range(num_layers) if layer == 0 or layer % 4)
    heads = own.number("num_heads", int, fields.number("linear_num_heads", int, default=32))
    size = own.number("head_dim", int, fields.number("linear_head_dim", int, default=128))
    taps = fields.number("linear_conv_kernel_dim", int, default=4)
    return LinearConfig(
        layers=layers,
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=size,
        value_dim=size,
        conv_kernel=own.number("short_conv_kernel_size", int, default=taps),
    )


_EXPERTS = MoeConfig(
    num_experts=256,
    top_k=8,
    intermediate_size=1024,
    normalize=True,
    sparse_layers=frozenset(),
    shared_size=1024,
    num_groups=1,
    top_groups=1,
    scale=2.446,
    biased_choice=True,
)
"""What the published files may leave out."""


@dataclass(frozen=True, slots=True)
class _Projection:
    """Inputs of the delta rule.

    Attributes:
        main: to queries, keys, values, shares, and what decays and gates are made of.
        forget: to the decay of every channel, before its activation.
        gate: to the gate of the output.
        rate: [heads, 1] fp32, how fast a state decays.
        bias: [heads, key_dim] fp32, of the decay.
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


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
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


FAMILY = Family(_configure, _load_layer, {"rms_norm_eps": 1e-5}, aliases=EXPERT_ALIASES)
