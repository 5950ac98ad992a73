"""Layers with LayerNorm (mean subtracted, bias added): serial or parallel attention and MLP.

Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layers import Mixer, Mlp, Step
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import layer_ops


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A LayerNorm of the stream.

    Attributes:
        weight, bias: [hidden].
    """

    weight: Tensor
    bias: Tensor
    eps: float

    def of_sum(self, x: Tensor, delta: Tensor | None) -> Tensor:
        """Adds `delta` to the stream `x` in place and normalises the sum; [rows, hidden]."""
        return layer_ops.add_layer_norm(x, delta, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class SerialLayer:
    """Layer with a norm before attention and a norm before the MLP."""

    input_norm: LayerNorm
    mixer: Mixer
    post_norm: LayerNorm
    mlp: Mlp

    def run(
        self, x: Tensor, delta: Tensor | None, step: Step, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Layer.run`."""
        delta = self.mixer.run(self.input_norm.of_sum(x, delta), step, keep)
        if keep is not None:
            x = x[keep]
        return x, self.mlp.run(self.post_norm.of_sum(x, delta))


@dataclass(frozen=True, slots=True)
class ParallelLayer:
    """Layer with attention and MLP in parallel.

    Attributes:
        mlp_norm: norm of the MLP's input; None if the MLP reads the input of attention.
    """

    input_norm: LayerNorm
    mixer: Mixer
    mlp_norm: LayerNorm | None
    mlp: Mlp

    def run(
        self, x: Tensor, delta: Tensor | None, step: Step, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Layer.run`."""
        h = self.input_norm.of_sum(x, delta)
        part = self.mixer.run(h, step, keep)
        if keep is not None:
            x, h = x[keep], h[keep]
        if self.mlp_norm is not None:
            h = self.mlp_norm.of_sum(x, None)
        return x, part + self.mlp.run(h)


def load_layer_norm(
    weights: LayerWeights, config: ModelConfig, name: str, *, offset: float = 0.0
) -> LayerNorm:
    """Reads a LayerNorm.

    Args:
        offset: value added to its weights.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    hidden = config.hidden_size
    weight = weights.vector(f"{name}.weight", hidden, offset)
    return LayerNorm(weight, weights.vector(f"{name}.bias", hidden), config.rms_norm_eps)


def load_serial_layer(
    weights: LayerWeights, config: ModelConfig, mixer: Mixer, mlp: Mlp, *, offset: float = 0.0
) -> SerialLayer:
    """Reads the norms of a layer by their usual names.

    Args:
        offset: value added to their weights.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    return SerialLayer(
        input_norm=load_layer_norm(weights, config, "input_layernorm", offset=offset),
        mixer=mixer,
        post_norm=load_layer_norm(weights, config, "post_attention_layernorm", offset=offset),
        mlp=mlp,
    )
