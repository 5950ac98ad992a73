"""Layers of Ernie 4.5 with experts; see families/ernie4_5_moe.py."""

from __future__ import annotations

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.experts import GroupRoute, experts_or_dense, load_routed
from kvmesh.engine.layers import MixerLayer, Mlp
from kvmesh.engine.weights import LayerWeights


def _load_experts(weights: LayerWeights, config: ModelConfig) -> Mlp:
    moe = config.moe
    assert moe is not None
    bias = weights.exact("mlp.moe_statics.e_score_correction_bias", (1, moe.num_experts))
    route = GroupRoute(
        top_k=moe.top_k,
        num_groups=1,
        top_groups=1,
        normalize=True,
        scale=1.0,
        bias=bias[0],
        is_softmax=True,
    )
    return load_routed(weights, config, route)


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    mlp = experts_or_dense(weights, config, _load_experts)
    return load_pre_norm_layer(weights, config, mlp)
