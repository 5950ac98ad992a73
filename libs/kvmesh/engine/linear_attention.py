"""Linear attention by the gated delta rule, which hybrids use between attention layers.

A family defines the projections; convolution, recurrence, state and output are the same for all.
Source: Gated Delta Networks, arXiv 2412.06464.
Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import LinearConfig
from kvmesh.engine.kv_plan import KvPlace
from kvmesh.engine.layers import Step
from kvmesh.kernels import host_linear, layer_ops, linear_reference, reference
from kvmesh.kernels.linear import Linear
from kvmesh.kernels.states import StatePlaces


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """Inputs of the recurrence for each row.

    Attributes:
        mixed: [rows, conv_channels] queries, keys and values before the convolution.
        decay: [rows, value heads, 1 or key_dim] fp32, logarithms, at most 0.
        beta: [rows, value heads] fp32.
        gate: [rows, value heads, value_dim] gate of the output.
    """

    mixed: Tensor
    decay: Tensor
    beta: Tensor
    gate: Tensor


@dataclass(frozen=True, slots=True)
class _Recurrence:
    """See `kernels.states.Recurrence`; a state is the matrix, then the convolution's inputs."""

    inputs: DeltaInputs
    taps: Tensor
    shape: LinearConfig

    def step(self, rows: slice, states: Tensor) -> tuple[Tensor, Tensor]:
        """See `Recurrence.step`."""
        if self._on_host():
            return self._carry(rows, states)
        matrix, before = self._split(states)
        x = self.inputs.mixed[rows].float().unsqueeze(1)
        mixed, before = linear_reference.causal_conv(x, before, self.taps)
        q, k, v = self._heads(mixed.squeeze(1))
        decay, beta = self.inputs.decay[rows], self.inputs.beta[rows]
        out, matrix = linear_reference.delta_step(q, k, v, decay, beta, matrix)
        return out, torch.cat([matrix.flatten(1), before.flatten(1)], dim=1)

    def step_in_place(self, rows: slice, places: StatePlaces) -> Tensor:
        """See `PlacedRecurrence.step_in_place`."""
        shape = self.shape
        size = shape.num_value_heads * shape.key_dim * shape.value_dim
        before = places.read(size).view(-1, shape.conv_kernel - 1, shape.conv_channels)
        x = self.inputs.mixed[rows].float().unsqueeze(1)
        mixed, before = linear_reference.causal_conv(x, before, self.taps)
        places.write(before.flatten(1), size)
        q, k, v = self._heads(mixed.squeeze(1))
        decay, beta = self.inputs.decay[rows], self.inputs.beta[rows]
        return layer_ops.delta_step_in_place(q, k, v, decay, beta, places)

    def scan(self, rows: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `Recurrence.scan`."""
        if self._on_host():
            out, states = self._carry(rows, state[None])
            return out, states[0]
        matrix, before = self._split(state[None])
        x = self.inputs.mixed[rows].float()
        mixed, after = linear_reference.causal_conv(x, before[0], self.taps)
        q, k, v = self._heads(mixed)
        decay, beta = self.inputs.decay[rows], self.inputs.beta[rows]
        out, last = layer_ops.delta_scan(q, k, v, decay, beta, matrix[0])
        return out, torch.cat([last.flatten(), after.flatten()])

    def _on_host(self) -> bool:
        return host_linear.has_linear(self.inputs.mixed, self._heads_shape)

    @property
    def _heads_shape(self) -> host_linear.LinearShape:
        shape = self.shape
        return host_linear.LinearShape(
            shape.num_key_heads, shape.num_value_heads, shape.key_dim, shape.value_dim
        )

    def _carry(self, rows: slice, states: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the rows on the CPU: equally many successive rows for each state's sequence."""
        after = states.clone()
        inputs = self.inputs
        out = host_linear.delta_rule(
            inputs.mixed[rows],
            self.taps,
            inputs.decay[rows],
            inputs.beta[rows],
            after,
            self._heads_shape,
        )
        return out, after

    def _split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.shape
        size = shape.num_value_heads * shape.key_dim * shape.value_dim
        matrix, before = states[:, :size], states[:, size:]
        return (
            matrix.view(-1, shape.num_value_heads, shape.key_dim, shape.value_dim),
            before.view(len(states), shape.conv_kernel - 1, shape.conv_channels),
        )

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits [rows, conv_channels] into queries, keys and values, repeating shared keys."""
        shape = self.shape
        key_values = shape.num_key_heads * shape.key_dim
        active = functional.silu(mixed)
        sizes = [key_values, key_values, active.shape[1] - 2 * key_values]
        q, k, v = torch.split(active, sizes, dim=1)
        q, k = (x.view(len(x), shape.num_key_heads, shape.key_dim) for x in (q, k))
        q = linear_reference.l2_normalize(q) * shape.key_dim**-0.5
        k = linear_reference.l2_normalize(k)
        shared = shape.num_value_heads // shape.num_key_heads
        if shared > 1:
            q, k = q.repeat_interleave(shared, dim=1), k.repeat_interleave(shared, dim=1)
        return q, k, v.view(len(v), shape.num_value_heads, shape.value_dim)


@dataclass(frozen=True, slots=True)
class DeltaAttention:
    """One linear attention layer.

    Attributes:
        project: maps [rows, hidden] to the recurrence's inputs.
        taps: [kernel, conv_channels] fp32 taps of the convolution, oldest input first.
        norm: [value_dim], norm of each head's output.
        activate: activation of the gate.
    """

    project: Callable[[Tensor], DeltaInputs]
    taps: Tensor
    norm: Tensor
    activate: Callable[[Tensor], Tensor]
    output: Linear
    place: KvPlace
    shape: LinearConfig
    eps: float

    def run(self, h: Tensor, step: Step, keep: Tensor | None) -> Tensor:
        """Maps normalised [rows, hidden] to [rows or kept, hidden]."""
        states = step.memory.states
        assert states is not None, "the step has no states"
        inputs = self.project(h)
        recurrence = _Recurrence(inputs, self.taps, self.shape)
        place = self.place
        out = states.run(place.group, place.slot, self.shape.state_values, recurrence)
        gate = inputs.gate
        if keep is not None:
            out, gate = out[keep], gate[keep]
        normed = reference.rms_norm(out, self.norm.float(), self.eps)
        gated = normed * self.activate(gate.float())
        return self.output(gated.to(h.dtype).flatten(1))


def load_taps(weight: Tensor) -> Tensor:
    """Converts taps of a depthwise convolution from the files' [channels, 1, kernel]."""
    return weight.squeeze(1).T.float().contiguous()
