"""Per-layer embeddings: an input of each layer besides the stream, as in Gemma 4.

Source: the reference code published with the Gemma 3n weights.
Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.weights import WeightFiles
from kvmesh.kernels import reference
from kvmesh.kernels.linear import Linear, make_linear


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Per-layer embeddings of all layers: a lookup by token plus a projection of its embedding.

    Attributes:
        embedding: [vocab, layers * size].
        scale: factor of the looked-up values.
        project: projection from [hidden].
        projected_scale: factor of the projected values.
        norm: [size], norm of each layer's projected part.
    """

    embedding: Tensor
    scale: float
    project: Linear
    projected_scale: float
    norm: Tensor
    eps: float

    def of(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """Returns the per-layer embeddings of a step's rows.

        Args:
            token_ids: [rows] int64.
            x: [rows, hidden], their embeddings.

        Returns:
            [rows, layers, size].
        """
        looked_up = functional.embedding(token_ids, self.embedding) * self.scale
        parts = (len(x), -1, len(self.norm))
        projected = (self.project(x) * self.projected_scale).view(parts)
        normed = reference.rms_norm(projected, self.norm, self.eps)
        # Keeps the length: the sum of two independent vectors of equal length is sqrt(2) longer.
        return (normed + looked_up.view(parts)) * math.sqrt(0.5)


def load_layer_inputs(
    files: WeightFiles, config: ModelConfig, prefix: str, dtype: torch.dtype, device: str
) -> LayerInputs | None:
    """Reads the per-layer embeddings of a model; None if it has none.

    Args:
        prefix: name prefix of the decoder's tensors.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    size, hidden = config.layer_input_size, config.hidden_size
    if not size:
        return None
    columns = config.num_layers * size

    def matrix(name: str, rows: int, columns: int) -> Tensor:
        return files.read_rows([(f"{prefix}.{name}.weight", rows)], columns, dtype, device)

    norm = files.read(f"{prefix}.per_layer_projection_norm.weight", (size,))
    return LayerInputs(
        embedding=matrix("embed_tokens_per_layer", config.layer_input_vocab, columns),
        # Rounded like the scale of embeddings.
        scale=float(torch.tensor(size**0.5, dtype=dtype)),
        project=make_linear(matrix("per_layer_model_projection", columns, hidden)),
        projected_scale=hidden**-0.5,
        norm=norm.to(device, dtype),
        eps=config.rms_norm_eps,
    )
