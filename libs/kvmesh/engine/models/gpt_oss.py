"""gpt-oss: windows in every other layer, sinks, biases, and experts with a bounded activation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import GatedMlp, MixerLayer, make_sparse_mlp
from kvmesh.engine.models.family import Family, windows_of_types
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import reference
from kvmesh.kernels.linear import make_linear


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    types = fields.layer_types(config.num_layers)
    if types is None:
        types = tuple(
            "full_attention" if layer % 2 else "sliding_attention"
            for layer in range(config.num_layers)
        )
    moe = MoeConfig(
        num_experts=fields.number("num_local_experts", int),
        top_k=fields.number("num_experts_per_tok", int, default=4),
        intermediate_size=config.intermediate_size,
        normalize=True,
        sparse_layers=frozenset(range(config.num_layers)),
    )
    return replace(
        config,
        windows=windows_of_types(fields, types),
        moe=moe,
        swiglu_alpha=fields.number("swiglu_alpha", float, default=1.702),
        swiglu_limit=fields.number("swiglu_limit", float, default=7.0),
    )


def route_among_best(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """As `layer_ops.route`, but the softmax is over the chosen experts' scores alone."""
    best, experts = logits.topk(top_k, dim=-1)
    return torch.softmax(best, dim=-1), experts


def _load_experts(weights: LayerWeights, config: ModelConfig, moe: MoeConfig) -> list[GatedMlp]:
    hidden, size, number = config.hidden_size, moe.intermediate_size, moe.num_experts
    gate_up = weights.tensor("mlp.experts.gate_up_proj", (number, hidden, 2 * size))
    gate_up_bias = weights.tensor("mlp.experts.gate_up_proj_bias", (number, 2 * size))
    down = weights.tensor("mlp.experts.down_proj", (number, size, hidden))
    down_bias = weights.tensor("mlp.experts.down_proj_bias", (number, hidden))
    activation = partial(
        reference.clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit
    )

    def gates_first(interleaved: Tensor) -> Tensor:
        return torch.cat([interleaved[::2], interleaved[1::2]])

    return [
        GatedMlp(
            # Stored as [inputs, outputs], gates and the rest taking turns.
            make_linear(gates_first(gate_up[expert].T), gates_first(gate_up_bias[expert])),
            make_linear(down[expert].T.contiguous(), down_bias[expert]),
            activation,
        )
        for expert in range(number)
    ]


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    moe = config.moe
    assert moe is not None
    router_bias = weights.vector("mlp.router.bias", moe.num_experts)
    mlp = make_sparse_mlp(
        weights.linear("mlp.router.weight", moe.num_experts, config.hidden_size, router_bias),
        partial(route_among_best, top_k=moe.top_k),
        _load_experts(weights, config, moe),
    )
    sinks = weights.vector("self_attn.sinks", config.num_heads).float()
    return load_pre_norm_layer(weights, config, mlp, sinks)


FAMILY = Family(
    _configure,
    _load_layer,
    {
        "attention_bias": True,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False}
        | {"original_max_position_embeddings": 4096},
        "sliding_window": 128,
    },
    rope_theta=150000.0,
)
