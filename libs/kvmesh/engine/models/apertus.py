"""Apertus: norms of queries and keys, an MLP without a gate whose activation (xIELU) is learned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch.nn import functional

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import MixerLayer
from kvmesh.engine.models.family import Family
from kvmesh.engine.plain_mlp import load_plain_mlp
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import reference


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, qk_norm=True, gated_mlp=False)


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    # The two that are learned are stored as what softplus makes them of.
    rise, fall = (
        functional.softplus(weights.exact(f"mlp.act_fn.alpha_{name}", (1,))).item() for name in "pn"
    )
    slope, edge = (weights.exact(f"mlp.act_fn.{name}", ()).item() for name in ("beta", "eps"))
    activation = partial(reference.xielu, rise=rise, fall=slope + fall, slope=slope, edge=edge)
    return load_pre_norm_layer(weights, config, load_plain_mlp(weights, config, activation))


FAMILY = Family(
    _configure,
    _load_layer,
    {
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "llama3",
            "rope_theta": 12e6,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    rope_theta=12e6,
    activations=("xielu",),
    tensor_names=(
        (".input_layernorm.", ".attention_layernorm."),
        (".post_attention_layernorm.", ".feedforward_layernorm."),
    ),
)
