"""Layers of Apertus; see families/apertus.py."""

from __future__ import annotations

from functools import partial

from torch.nn import functional

from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layers import MixerLayer
from kvmesh.engine.plain_mlp import load_plain_mlp
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import reference


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    # The two learned parameters are stored before their softplus.
    rise, fall = (
        functional.softplus(weights.exact(f"mlp.act_fn.alpha_{name}", (1,))).item() for name in "pn"
    )
    slope, edge = (weights.exact(f"mlp.act_fn.{name}", ()).item() for name in ("beta", "eps"))
    activation = partial(reference.xielu, rise=rise, fall=slope + fall, slope=slope, edge=edge)
    return load_pre_norm_layer(weights, config, load_plain_mlp(weights, config, activation))
