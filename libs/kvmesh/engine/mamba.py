"""Mamba-2 layers, which hybrids use between attention layers.

Source: Mamba-2, arXiv 2405.21060. Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import LinearConfig, ModelConfig
from kvmesh.engine.kv_plan import KvPlace
from kvmesh.engine.layers import Step
from kvmesh.engine.linear_attention import load_taps
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import layer_ops, linear_reference, mamba_reference, reference
from kvmesh.kernels.linear import Linear
from kvmesh.kernels.states import StatePlaces


@dataclass(frozen=True, slots=True)
class _Heads:
    """Parameters of a recurrence per head, and of its convolution.

    Attributes:
        taps: [kernel, channels] fp32, oldest input first.
        taps_bias: [channels] fp32.
        rate: [heads] fp32, decay rate of a state, below 0.
        skip: [heads] fp32, factor of values that bypass the state (D).
    """

    taps: Tensor
    taps_bias: Tensor
    rate: Tensor
    skip: Tensor


@dataclass(frozen=True, slots=True)
class _Recurrence:
    """See `kernels.states.Recurrence`; a state is the matrix, then the convolution's inputs.

    Attributes:
        mixed: [rows, channels] fp32, values, keys and queries before the convolution.
        durations: [rows, heads] fp32, time steps, above 0.
    """

    mixed: Tensor
    durations: Tensor
    heads: _Heads
    shape: LinearConfig

    def step(self, rows: slice, states: Tensor) -> tuple[Tensor, Tensor]:
        """See `Recurrence.step`."""
        matrix, before = self._split(states)
        taps = self.heads.taps
        mixed, before = linear_reference.causal_conv(self.mixed[rows].unsqueeze(1), before, taps)
        q, k, v, decay, skipped = self._inputs(mixed.squeeze(1), self.durations[rows])
        out, matrix = mamba_reference.mamba_step(q, k, v, decay, matrix)
        return out + skipped, torch.cat([matrix.flatten(1), before.flatten(1)], dim=1)

    def step_in_place(self, rows: slice, places: StatePlaces) -> Tensor:
        """See `PlacedRecurrence.step_in_place`."""
        shape = self.shape
        size = shape.num_value_heads * shape.key_dim * shape.value_dim
        before = places.read(size).view(-1, shape.conv_kernel - 1, shape.conv_channels)
        x, taps = self.mixed[rows].unsqueeze(1), self.heads.taps
        mixed, before = linear_reference.causal_conv(x, before, taps)
        places.write(before.flatten(1), size)
        q, k, v, decay, skipped = self._inputs(mixed.squeeze(1), self.durations[rows])
        return layer_ops.mamba_step_in_place(q, k, v, decay, places) + skipped

    def scan(self, rows: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `Recurrence.scan`."""
        matrix, before = self._split(state[None])
        taps = self.heads.taps
        mixed, after = linear_reference.causal_conv(self.mixed[rows], before[0], taps)
        q, k, v, decay, skipped = self._inputs(mixed, self.durations[rows])
        out, last = layer_ops.mamba_scan(q, k, v, decay, matrix[0])
        return out + skipped, torch.cat([last.flatten(), after.flatten()])

    def _split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.shape
        size = shape.num_value_heads * shape.key_dim * shape.value_dim
        matrix, before = states[:, :size], states[:, size:]
        return (
            matrix.view(-1, shape.num_value_heads, shape.key_dim, shape.value_dim),
            before.view(len(states), shape.conv_kernel - 1, shape.conv_channels),
        )

    def _inputs(
        self, mixed: Tensor, durations: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns queries, keys, values, decays, and the values that bypass the state."""
        shape = self.shape
        active = functional.silu(mixed + self.heads.taps_bias)
        of_groups = shape.num_key_heads * shape.key_dim
        sizes = [active.shape[1] - 2 * of_groups, of_groups, of_groups]
        v, k, q = torch.split(active, sizes, dim=1)
        q, k = (x.view(len(x), shape.num_key_heads, shape.key_dim) for x in (q, k))
        v = v.view(len(v), shape.num_value_heads, shape.value_dim)
        skipped = v * self.heads.skip[:, None]
        return q, k, v * durations.unsqueeze(-1), durations * self.heads.rate, skipped


@dataclass(frozen=True, slots=True)
class Mamba:
    """One Mamba-2 layer.

    Attributes:
        project: projection to the gate, the convolution's input, and each head's duration.
        duration_bias: [heads] fp32.
        norm: [groups, values of a group] fp32, norm of the gated output; None for none.
    """

    project: Linear
    duration_bias: Tensor
    heads: _Heads
    norm: Tensor | None
    output: Linear
    place: KvPlace
    shape: LinearConfig
    eps: float

    def run(self, h: Tensor, step: Step, keep: Tensor | None) -> Tensor:
        """Maps normalised [rows, hidden] to [rows or kept, hidden]."""
        states = step.memory.states
        assert states is not None, "the step has no states"
        shape, place = self.shape, self.place
        values = shape.num_value_heads * shape.value_dim
        sizes = [values, shape.conv_channels, shape.num_value_heads]
        gate, mixed, time = torch.split(self.project(h), sizes, dim=1)
        durations = functional.softplus(time.float() + self.duration_bias)
        recurrence = _Recurrence(mixed.float(), durations, self.heads, shape)
        out = states.run(place.group, place.slot, shape.state_values, recurrence)
        if keep is not None:
            out, gate = out[keep], gate[keep]
        gated = out.flatten(1) * functional.silu(gate.float())
        if self.norm is not None:
            of_groups = gated.view(len(out), *self.norm.shape)
            gated = reference.rms_norm(of_groups, self.norm, self.eps).flatten(1)
        return self.output(gated.to(h.dtype))


def load_mamba(weights: LayerWeights, config: ModelConfig) -> Mamba:
    """Reads one layer by its usual names; the convolution has a bias.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    shape, hidden = config.linear, config.hidden_size
    assert shape is not None
    heads, channels = shape.num_value_heads, shape.conv_channels
    values = heads * shape.value_dim
    taps = weights.tensor("mamba.conv1d.weight", (channels, 1, shape.conv_kernel))
    norm = None
    if config.state_norm_eps:
        norm = weights.exact("mamba.norm.weight", (values,)).view(shape.num_key_heads, -1)
    return Mamba(
        project=weights.linear("mamba.in_proj.weight", values + channels + heads, hidden),
        duration_bias=weights.exact("mamba.dt_bias", (heads,)),
        heads=_Heads(
            taps=load_taps(taps),
            taps_bias=weights.exact("mamba.conv1d.bias", (channels,)),
            rate=-weights.exact("mamba.A_log", (heads,)).exp(),
            skip=weights.exact("mamba.D", (heads,)),
        ),
        norm=norm,
        output=weights.linear("mamba.out_proj.weight", hidden, values),
        place=weights.place,
        shape=shape,
        eps=config.state_norm_eps,
    )
