"""Gated delta net as the Qwen families have it: its shape, its projections, its tensors.

Families differ in how the files lay the input projections out, which they read themselves.
Source: Gated Delta Networks, arXiv 2412.06464.
Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import LinearConfig, ModelConfig
from kvmesh.engine.linear_attention import DeltaAttention, DeltaInputs, load_taps
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels.linear import Linear, make_linear


@dataclass(frozen=True, slots=True)
class _Projection:
    """Inputs of the delta rule.

    Attributes:
        main: to queries, keys, values and the gate.
        rates: to the share and the time step of each value head.
        rate: [value heads] fp32, how fast a state decays.
        bias: [value heads] fp32, of the time step.
        largest_share: of a state that a position may take back.
    """

    main: Linear
    rates: Linear
    rate: Tensor
    bias: Tensor
    shape: LinearConfig
    largest_share: float

    def __call__(self, h: Tensor) -> DeltaInputs:
        shape = self.shape
        values = shape.num_value_heads * shape.value_dim
        mixed, gate = torch.split(self.main(h), [shape.conv_channels, values], dim=1)
        share, time = self.rates(h).float().chunk(2, dim=1)
        decay = -self.rate * functional.softplus(time + self.bias)
        return DeltaInputs(
            mixed=mixed,
            decay=decay.unsqueeze(-1),
            beta=torch.sigmoid(share) * self.largest_share,
            gate=gate.view(len(h), shape.num_value_heads, shape.value_dim),
        )


def load_gated_delta(
    weights: LayerWeights,
    config: ModelConfig,
    main: Tensor,
    rates: Tensor,
    *,
    taps: Tensor | None = None,
    eps: float | None = None,
    largest_share: float = 1.0,
) -> DeltaAttention:
    """Reads one layer, but for the input projections.

    Args:
        main: [queries + keys + values + gates, hidden], all heads of a kind together.
        rates: [2 * value heads, hidden], shares and then time steps.
        taps: [channels, 1, kernel] of the convolution; None for those of the usual name.
        eps: of the output's norm; None for that of all norms.
        largest_share: see `_Projection`.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    shape = config.linear
    assert shape is not None
    heads = shape.num_value_heads
    if taps is None:
        sizes = (shape.conv_channels, 1, shape.conv_kernel)
        taps = weights.tensor("linear_attn.conv1d.weight", sizes)
    return DeltaAttention(
        project=_Projection(
            make_linear(main),
            make_linear(rates),
            weights.exact("linear_attn.A_log", (heads,)).exp(),
            weights.exact("linear_attn.dt_bias", (heads,)),
            shape,
            largest_share,
        ),
        taps=load_taps(taps),
        norm=weights.vector("linear_attn.norm.weight", shape.value_dim),
        activate=functional.silu,
        output=weights.linear(
            "linear_attn.out_proj.weight", config.hidden_size, heads * shape.value_dim
        ),
        place=weights.place,
        shape=shape,
        eps=config.rms_norm_eps if eps is None else eps,
    )
