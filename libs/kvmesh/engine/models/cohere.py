"""Layers of Command R; see families/cohere.py."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layers import DENSE_MLP, Mixer, Mlp, Step, load_gated_mlp
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import layer_ops


@dataclass(frozen=True, slots=True)
class _ParallelLayer:
    """Layer with one norm, whose output both attention and MLP read."""

    norm: Tensor
    mixer: Mixer
    mlp: Mlp
    eps: float

    def run(
        self, x: Tensor, delta: Tensor | None, step: Step, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Layer.run`."""
        if delta is None:
            x = _centred(x)
        h = layer_ops.add_rms_norm(x, delta, self.norm, self.eps)
        part = self.mixer.run(h, step, keep)
        if keep is not None:
            x, h = x[keep], h[keep]
        return x, _centred(part + self.mlp.run(h))


def _centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(dim=-1, keepdim=True)


def load_layer(weights: LayerWeights, config: ModelConfig) -> _ParallelLayer:
    """See `LoadLayer`."""
    hidden = config.hidden_size
    return _ParallelLayer(
        norm=weights.vector("input_layernorm.weight", hidden),
        mixer=load_attention(weights, config),
        mlp=load_gated_mlp(weights, DENSE_MLP, hidden, config.intermediate_size),
        eps=config.rms_norm_eps,
    )
