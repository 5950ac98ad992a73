"""MLPs without a gate. Tests: tests/integration/test_transformers_equality.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layers import by_cached_rows
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """Two projections with an activation between them.

    Attributes:
        activation: applied to every value between them.
    """

    up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor]

    def run(self, h: Tensor) -> Tensor:
        """See `Mlp.run`."""
        return by_cached_rows(lambda rows: self.down(self.activation(self.up(rows))), h)


def load_plain_mlp(
    weights: LayerWeights,
    config: ModelConfig,
    activation: Callable[[Tensor], Tensor],
    names: tuple[str, str] = ("mlp.up_proj", "mlp.down_proj"),
) -> PlainMlp:
    """Reads an MLP.

    Args:
        names: names of the projections.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """

    def linear(name: str, rows: int, columns: int) -> Linear:
        bias = weights.vector(f"{name}.bias", rows) if config.mlp_bias else None
        return weights.linear(f"{name}.weight", rows, columns, bias)

    up, down = names
    hidden, inner = config.hidden_size, config.intermediate_size
    return PlainMlp(linear(up, inner, hidden), linear(down, hidden, inner), activation)
