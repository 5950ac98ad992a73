"""Bailing hybrid (Ling 3.0): KDA in most layers, latent attention with a gate per head in the
others, DeepSeek's choice of experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import LinearConfig, ModelConfig, MoeConfig
from kvmesh.engine.experts import experts_or_dense, load_group_routed
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.kda import load_kda
from kvmesh.engine.latent import load_latent_attention
from kvmesh.engine.layers import Mixer, MixerLayer, load_mixer_layer
from kvmesh.engine.linear_attention import DeltaInputs
from kvmesh.engine.models.family import EXPERT_ALIASES, Family, grouped_experts, latent_shape
from kvmesh.engine.rope_fields import yarn_scale
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels.linear import Linear, make_linear


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("score_function", "sigmoid")
    latent = latent_shape(fields, interleaved=True)
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5
    bound = fields.real("kda_lower_bound", default=-5.0)
    return replace(
        config,
        # The head is its own whatever the file says: transformers ties none of this family.
        tie_word_embeddings=False,
        head_dim=latent.rope_dim,
        latent=latent,
        linear=_linear(fields, config),
        moe=grouped_experts(fields, config.num_layers, _EXPERTS, usual_dense=2),
        attention_scale=scale * yarn_scale(fields) ** 2,
        decay_bound=bound if fields.flag("kda_safe_gate", default=True) else 0.0,
    )


def _linear(fields: Fields, config: ModelConfig) -> LinearConfig:
    types = fields.layer_types(config.num_layers)
    if types is None:
        every = fields.number("layer_group_size", int, default=6)
        layers = frozenset(i for i in range(config.num_layers) if (i + 1) % every)
    else:
        layers = frozenset(i for i, kind in enumerate(types) if kind == "linear_attention")
    taps = fields.number("short_conv_kernel_size", int, default=4)
    heads = fields.number("linear_num_heads", int, default=config.num_heads)
    size = fields.number("linear_head_dim", int, default=config.head_dim)
    return LinearConfig(
        layers=layers,
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=size,
        value_dim=size,
        conv_kernel=fields.number("linear_conv_kernel_dim", int, default=taps),
    )


_EXPERTS = MoeConfig(
    num_experts=512,
    top_k=8,
    intermediate_size=768,
    normalize=True,
    sparse_layers=frozenset(),
    shared_size=768,
    num_groups=8,
    top_groups=4,
    scale=2.5,
    biased_choice=True,
)
"""What the published files may leave out."""


@dataclass(frozen=True, slots=True)
class _Projection:
    """Inputs of the delta rule.

    Attributes:
        main: to queries, keys, values, shares, decays and gates.
        rate: [heads, 1] fp32, how fast a state decays.
        bias: [heads, key_dim] fp32, of the decay.
        bound: the fastest decay, a logarithm; 0 where there is none.
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


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    mixer: Mixer
    if config.is_linear(weights.layer):
        mixer = load_kda(weights, config, _project(weights, config))
    else:
        gate = weights.linear("self_attn.g_proj.weight", config.num_heads, config.hidden_size)
        mixer = load_latent_attention(weights, config, gate=gate)
    mlp = experts_or_dense(weights, config, load_group_routed)
    return load_mixer_layer(weights, config, mixer, mlp)


FAMILY = Family(
    _configure,
    _load_layer,
    {"head_dim": 128},
    rope_theta=6e6,
    aliases=EXPERT_ALIASES,
    tensor_names=(
        ("model.embed_tokens.", "model.word_embeddings."),
        (".self_attn.o_proj.", ".self_attn.dense."),
        (".self_attn.", ".attention."),
        (".gate.e_score_correction_bias", ".gate.expert_bias"),
    ),
)
