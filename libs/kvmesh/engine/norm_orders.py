"""Layers with norms in other places than Llama's: after each part, or on both sides of it.

Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layers import DENSE_MLP, Mixer, Mlp, Step, load_gated_mlp
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import layer_ops


@dataclass(frozen=True, slots=True)
class SandwichLayer:
    """Layer with a norm before and after attention, and before and after the MLP."""

    input_norm: Tensor
    mixer: Mixer
    post_mixer_norm: Tensor
    pre_mlp_norm: Tensor
    mlp: Mlp
    post_mlp_norm: Tensor
    eps: float

    def run(
        self, x: Tensor, delta: Tensor | None, step: Step, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Layer.run`."""
        h = layer_ops.add_rms_norm(x, delta, self.input_norm, self.eps)
        h = self.mixer.run(h, step, keep)
        delta = layer_ops.add_rms_norm(h, None, self.post_mixer_norm, self.eps)
        if keep is not None:
            x = x[keep]
        h = layer_ops.add_rms_norm(x, delta, self.pre_mlp_norm, self.eps)
        return x, layer_ops.add_rms_norm(self.mlp.run(h), None, self.post_mlp_norm, self.eps)


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    """Layer with a norm only after attention and after the MLP; both read the stream unnormed."""

    mixer: Mixer
    post_mixer_norm: Tensor
    mlp: Mlp
    post_mlp_norm: Tensor
    eps: float

    def run(
        self, x: Tensor, delta: Tensor | None, step: Step, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Layer.run`."""
        if delta is not None:
            x += delta
        h = self.mixer.run(x, step, keep)
        if keep is not None:
            x = x[keep]
        x += layer_ops.add_rms_norm(h, None, self.post_mixer_norm, self.eps)
        return x, layer_ops.add_rms_norm(self.mlp.run(x), None, self.post_mlp_norm, self.eps)


def load_post_norm_layer(weights: LayerWeights, config: ModelConfig) -> PostNormLayer:
    """Reads a layer with norms after its parts, by their usual names.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    hidden = config.hidden_size
    return PostNormLayer(
        mixer=load_attention(weights, config),
        post_mixer_norm=weights.vector("post_attention_layernorm.weight", hidden),
        mlp=load_gated_mlp(weights, DENSE_MLP, hidden, config.intermediate_size),
        post_mlp_norm=weights.vector("post_feedforward_layernorm.weight", hidden),
        eps=config.rms_norm_eps,
    )
