"""Layers that mix positions by a short convolution between two gates, as in LFM2.

Source: the reference code published with the LFM2 weights.
Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvmesh.engine.config import LinearConfig, ModelConfig
from kvmesh.engine.kv_plan import KvPlace
from kvmesh.engine.layers import Step
from kvmesh.engine.linear_attention import load_taps
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import linear_reference
from kvmesh.kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class _Recurrence:
    """See `kernels.states.Recurrence`; a state is the convolution's inputs.

    Attributes:
        rows: [rows, channels] fp32.
        taps: [kernel, channels] fp32, oldest input first.
    """

    rows: Tensor
    taps: Tensor

    def step(self, rows: slice, states: Tensor) -> tuple[Tensor, Tensor]:
        """See `Recurrence.step`."""
        before = states.view(len(states), len(self.taps) - 1, -1)
        out, after = linear_reference.causal_conv(self.rows[rows].unsqueeze(1), before, self.taps)
        return out.squeeze(1), after.flatten(1)

    def scan(self, rows: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `Recurrence.scan`."""
        before = state.view(len(self.taps) - 1, -1)
        out, after = linear_reference.causal_conv(self.rows[rows], before, self.taps)
        return out, after.flatten()


@dataclass(frozen=True, slots=True)
class ShortConv:
    """One layer with a short convolution.

    Attributes:
        project: projection to [3 * hidden]: the gate before the convolution, the gate after it,
            and its input.
        taps: [kernel, hidden] fp32, oldest input first.
    """

    project: Linear
    taps: Tensor
    output: Linear
    place: KvPlace
    shape: LinearConfig

    def run(self, h: Tensor, step: Step, keep: Tensor | None) -> Tensor:
        """Maps normalised [rows, hidden] to [rows or kept, hidden]."""
        states = step.memory.states
        assert states is not None, "the step has no states"
        before, behind, x = self.project(h).chunk(3, dim=1)
        recurrence = _Recurrence((before * x).float(), self.taps)
        place = self.place
        out = states.run(place.group, place.slot, self.shape.state_values, recurrence)
        if keep is not None:
            out, behind = out[keep], behind[keep]
        return self.output(behind * out.to(h.dtype))


def load_short_conv(weights: LayerWeights, config: ModelConfig) -> ShortConv:
    """Reads one layer.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    shape, hidden = config.linear, config.hidden_size
    assert shape is not None
    return ShortConv(
        project=weights.linear("conv.in_proj.weight", 3 * hidden, hidden),
        taps=load_taps(weights.tensor("conv.conv.weight", (hidden, 1, shape.conv_kernel))),
        output=weights.linear("conv.out_proj.weight", hidden, hidden),
        place=weights.place,
        shape=shape,
    )
