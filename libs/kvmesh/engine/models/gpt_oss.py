"""Layers of gpt-oss; see families/gpt_oss.py."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.layers import GatedMlp, MixerLayer, make_sparse_mlp
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import reference
from kvmesh.kernels.linear import make_linear


def route_among_best(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Variant of `layer_ops.route` with a softmax over the chosen experts' scores only."""
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
            # Stored as [inputs, outputs], with gates and ups interleaved.
            make_linear(gates_first(gate_up[expert].T), gates_first(gate_up_bias[expert])),
            make_linear(down[expert].T.contiguous(), down_bias[expert]),
            activation,
        )
        for expert in range(number)
    ]


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
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
