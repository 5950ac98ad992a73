"""`recurrence.h` on torch tensors: linear attention whose states are carried row by row.

The twins are in linear_reference.py and lightning_reference.py.
Tests: tests/unit/kernels/test_host_linear.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvmesh.kernels import host

_VECTOR = 16
_MOST_KEYS = 256


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Heads of a linear layer.

    Attributes:
        key_heads: number of heads of queries and keys; each serves equally many of `heads`.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int


def has_linear(x: Tensor, shape: LinearShape) -> bool:
    """Returns whether the library supports the dtype and device of `x` with this shape."""
    return (
        shape.key_dim % _VECTOR == 0
        and shape.key_dim <= _MOST_KEYS
        and shape.value_dim % _VECTOR == 0
        and host.has_vectors(x)
    )


def delta_rule(
    mixed: Tensor,
    taps: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    shape: LinearShape,
) -> Tensor:
    """Computes convolution, silu, normalisation of queries and keys, and the gated delta rule.

    Args:
        mixed: [rows, channels] queries, keys and values of all heads, elements contiguous;
            equally many successive rows of each sequence.
        taps: [kernel, channels] fp32, oldest input first.
        decay: [rows, heads, 1 or key_dim] fp32, logarithms.
        beta: [rows, heads] fp32.
        states: [sequences, values] fp32, the matrices of the heads and then the convolution's
            previous inputs, [kernel - 1, channels]; changed in place.

    Returns:
        [rows, heads, value_dim] fp32.
    """
    rows, channels = mixed.shape
    assert mixed.stride(1) == 1
    assert states.stride(1) == 1
    assert taps.is_contiguous()
    decay, beta = decay.contiguous(), beta.contiguous()
    active = torch.empty(rows, channels, dtype=torch.float32)
    out = torch.empty(rows, shape.heads, shape.value_dim, dtype=torch.float32)
    host.function_of("delta_rule", mixed.dtype)(
        mixed.data_ptr(),
        mixed.stride(0),
        taps.data_ptr(),
        len(taps),
        decay.data_ptr(),
        decay.shape[2],
        beta.data_ptr(),
        states.data_ptr(),
        active.data_ptr(),
        out.data_ptr(),
        len(states),
        rows // len(states),
        shape.key_heads,
        shape.heads,
        shape.key_dim,
        shape.value_dim,
        states.stride(0),
        torch.get_num_threads(),
    )
    return out


def lightning(heads: Tensor, slopes: Tensor, states: Tensor, shape: LinearShape) -> Tensor:
    """Computes lightning attention.

    Args:
        heads: [rows, heads, 2 * key_dim + value_dim] fp32, queries, keys and values; equally many
            successive rows of each sequence.
        slopes: [heads] fp32.
        states: [sequences, heads * key_dim * value_dim] fp32; changed in place.

    Returns:
        [rows, heads, value_dim] fp32.
    """
    heads = heads.contiguous()
    assert states.stride(1) == 1
    decay = -slopes
    out = torch.empty(len(heads), shape.heads, shape.value_dim, dtype=torch.float32)
    host.function_of("lightning", torch.float32)(
        heads.data_ptr(),
        decay.data_ptr(),
        states.data_ptr(),
        out.data_ptr(),
        len(states),
        len(heads) // len(states),
        shape.heads,
        shape.key_dim,
        shape.value_dim,
        states.stride(0),
        torch.get_num_threads(),
    )
    return out
