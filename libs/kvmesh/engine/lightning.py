"""Lightning attention: linear attention whose state decays at a fixed rate per head.

Source: arXiv 2401.04658. Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import LinearConfig
from kvmesh.engine.kv_plan import KvPlace
from kvmesh.engine.layers import Step
from kvmesh.kernels import host_linear, layer_ops, lightning_reference, reference
from kvmesh.kernels.linear import Linear
from kvmesh.kernels.states import StatePlaces

# Epsilon of the output's norm, which config.json does not change.
_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class _Recurrence:
    """See `kernels.states.Recurrence`.

    Attributes:
        heads: [rows, heads, 3 * dim] fp32, queries, keys and values.
        slopes: [heads] fp32.
    """

    heads: Tensor
    slopes: Tensor

    def step(self, rows: slice, states: Tensor) -> tuple[Tensor, Tensor]:
        """See `Recurrence.step`."""
        if host_linear.has_linear(self.heads, self._shape):
            return self._carry(rows, states)
        q, k, v = self.heads[rows].chunk(3, dim=-1)
        matrices = states.view(len(states), q.shape[1], q.shape[2], v.shape[2])
        out, after = lightning_reference.lightning_step(q, k, v, self.slopes, matrices)
        return out, after.flatten(1)

    def step_in_place(self, rows: slice, places: StatePlaces) -> Tensor:
        """See `PlacedRecurrence.step_in_place`."""
        q, k, v = self.heads[rows].chunk(3, dim=-1)
        return layer_ops.lightning_step_in_place(q, k, v, self.slopes, places)

    def scan(self, rows: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `Recurrence.scan`."""
        if host_linear.has_linear(self.heads, self._shape):
            out, states = self._carry(rows, state[None])
            return out, states[0]
        q, k, v = self.heads[rows].chunk(3, dim=-1)
        matrix = state.view(q.shape[1], q.shape[2], v.shape[2])
        out, after = layer_ops.lightning_scan(q, k, v, self.slopes, matrix)
        return out, after.flatten()

    @property
    def _shape(self) -> host_linear.LinearShape:
        _, heads, width = self.heads.shape
        return host_linear.LinearShape(heads, heads, width // 3, width // 3)

    def _carry(self, rows: slice, states: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the rows on the CPU: equally many successive rows for each state's sequence."""
        after = states.clone()
        out = host_linear.lightning(self.heads[rows], self.slopes, after, self._shape)
        return out, after


@dataclass(frozen=True, slots=True)
class LightningAttention:
    """One lightning attention layer.

    Attributes:
        qkv: projection to queries, keys and values of each head, before their activation.
        gate: projection to one factor per value of the heads' output, before its sigmoid.
        norm: [heads * dim], norm over the output of all heads together.
        slopes: [heads] fp32, decrease of a state's logarithm per position.
    """

    qkv: Linear
    gate: Linear
    norm: Tensor
    slopes: Tensor
    output: Linear
    place: KvPlace
    shape: LinearConfig

    def run(self, h: Tensor, step: Step, keep: Tensor | None) -> Tensor:
        """Maps normalised [rows, hidden] to [rows or kept, hidden]."""
        states = step.memory.states
        assert states is not None, "the step has no states"
        active = functional.silu(self.qkv(h)).float()
        heads = active.view(len(h), self.shape.num_value_heads, -1)
        recurrence = _Recurrence(heads, self.slopes)
        place = self.place
        out = states.run(place.group, place.slot, self.shape.state_values, recurrence)
        if keep is not None:
            out, h = out[keep], h[keep]
        normed = reference.rms_norm(out.flatten(1), self.norm.float(), _NORM_EPS).to(h.dtype)
        return self.output(torch.sigmoid(self.gate(h)) * normed)


def head_slopes(num_heads: int, layer: int, num_layers: int) -> Tensor:
    """Returns each head's decay rate: later heads and later layers keep their state longer.

    Returns:
        [heads] fp32.

    Source: the reference code published with the MiniMax-Text-01 weights.
    """
    share = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    heads = torch.arange(1, num_heads + 1, dtype=torch.float32)
    return torch.exp2(heads * (-8.0 / num_heads)) * share
