"""Layers of Falcon-H1; see families/falcon_h1.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kvmesh.engine.attention import SelfAttention, load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layers import DENSE_MLP, MixerLayer, Step, load_gated_mlp, load_mixer_layer
from kvmesh.engine.mamba import Mamba, load_mamba
from kvmesh.engine.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class _Both:
    """Attention and Mamba in parallel."""

    attention: SelfAttention
    mamba: Mamba

    def run(self, h: Tensor, step: Step, keep: Tensor | None) -> Tensor:
        """Maps normalised [rows, hidden] to [rows or kept, hidden]."""
        return self.mamba.run(h, step, keep) + self.attention.run(h, step, keep)


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    assert weights.state_place is not None
    mixer = _Both(
        load_attention(weights, config),
        load_mamba(replace(weights, place=weights.state_place), config),
    )
    mlp = load_gated_mlp(weights, DENSE_MLP, config.hidden_size, config.intermediate_size)
    return load_mixer_layer(weights, config, mixer, mlp)
