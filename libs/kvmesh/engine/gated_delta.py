"""Gated delta net of the Qwen families: shape, projections, tensors.

The families read the input projections themselves, since their files lay them out differently.
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
        main: projection to queries, keys, values and the gate.
        rates: projection to beta and the time step of each value head.
        rate: [value heads] fp32, decay rate of a state.
        bias: [value heads] fp32, bias of the time step.
        largest_share: maximum of beta, the fraction of a state that a position may replace.
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
    """Reads one layer; the caller has read the input projections.

    Args:
        main: [queries + keys + values + gates, hidden], all heads of one kind together.
        rates: [2 * value heads, hidden], betas and then time steps.
        taps: [channels, 1, kernel] of the convolution; None to read them by the usual name.
        eps: epsilon of the output's norm; None for that of all norms.
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
