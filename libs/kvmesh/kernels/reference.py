"""A transformer step around attention in plain torch: the CPU path and the kernels' oracle.

`kv` is the whole pool, `[num_blocks, layers, 2, block_size, kv_heads, head_dim]`, contiguous.
Attention itself is in `attention_reference.py`. Tests: tests/unit/kernels/test_reference.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in fp32.

    Args:
        x: [..., dim] any float dtype.
        weight: broadcastable to `x`; when it has several axes each row has its own weights.

    Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    if weight.dim() == 1:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x, x.shape[-1:], None, eps) * weight


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Adds to the residual stream `x` in place and returns its norm.

    Args:
        x: [rows, dim].
        delta: [rows, dim], output of the layer before, or None to add nothing.
        weight: [dim].

    Returns:
        [rows, dim].
    """
    if delta is not None:
        x += delta
    return rms_norm(x, weight, eps)


def add_layer_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """LayerNorm variant of `add_rms_norm`: subtracts the mean first and adds a bias last.

    Args:
        weight, bias: [dim].

    Source: Ba et al., arXiv 1607.06450.
    """
    if delta is not None:
        x += delta
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def apply_rope(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotates pairs (i, i + head_dim / 2) of each head by the angle of the row's position.

    Args:
        x: [rows, heads, head_dim].
        cos: [rows, 1, head_dim], the same values in both halves.
        signed_sin: as `cos`, with the first half negated, so that `x` needs no negation.

    Source: Su et al., arXiv 2104.09864, in the half-split order of Llama checkpoints.
    """
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, swapped, signed_sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Computes SwiGLU's product: silu of the last axis's first half times the second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Computes GeGLU's product, with the tanh approximation of gelu."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def squared_relu(x: Tensor) -> Tensor:
    """Squares positive values; zero for others.

    Source: Primer, arXiv 2109.08668 §4.
    """
    return functional.relu(x).square_()


def xielu(x: Tensor, rise: float, fall: float, slope: float, edge: float) -> Tensor:
    """Computes xIELU: a parabola above zero, an integrated ELU below, with a linear term.

    Args:
        rise, fall: curvature above and below zero.
        edge: negative bound of the values whose exponential is taken.

    Source: arXiv 2411.13010 §3.
    """
    exact = x.float()
    below = (torch.expm1(exact.clamp(max=edge)) - exact) * fall
    return (torch.where(exact > 0, rise * exact.square(), below) + slope * exact).to(x.dtype)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Computes gpt-oss's product: sigmoid-weighted gate times one plus the ups, both clamped.

    Args:
        gate_up: [rows, 2 * intermediate], gates first.

    Source: the reference code published with the gpt-oss weights.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return gate.mul(torch.sigmoid(gate * alpha)).mul_(up.clamp(-limit, limit).add_(1))


def key_slots(slots: Tensor, kv: Tensor) -> Tensor:
    """Returns rows of layer 0's keys in the pool viewed as `[all slots, kv_heads * head_dim]`.

    Args:
        slots: [rows] int64, block id x block size + offset.

    Returns:
        [rows] int64, for `write_kv`.
    """
    _, layers, _, block_size, _, _ = kv.shape
    return slots // block_size * (layers * 2 * block_size) + slots % block_size


def write_kv(k: Tensor, v: Tensor, kv: Tensor, layer: int, rows: Tensor) -> None:
    """Scatters new keys and values into their slots; `kv` is written in place.

    Args:
        k, v: [num_rows, kv_heads, head_dim], the pool's dtype.
        rows: rows of `key_slots`.
    """
    block_size = kv.shape[3]
    flat = kv.view(-1, kv.shape[4] * kv.shape[5])
    first = layer * 2 * block_size
    flat[first:].index_copy_(0, rows, k.reshape(len(rows), -1))
    flat[first + block_size :].index_copy_(0, rows, v.reshape(len(rows), -1))


def rope_and_write(
    qkv: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    signed_sin: Tensor,
    kv: Tensor,
    layer: int,
    slots: Tensor,
) -> None:
    """Normalises (optionally) and rotates queries and keys, and writes keys and values.

    Args:
        qkv: [rows, heads + 2 * kv_heads, head_dim]; its queries and keys change in place.
        qk_norm: [heads + kv_heads, head_dim] or None.
        cos, signed_sin: [rows, 1, head_dim], see `apply_rope`.
        slots: [rows] int64, block id x block size + offset.
    """
    num_qk = qkv.shape[1] - kv.shape[4]
    qk = qkv[:, :num_qk]
    if qk_norm is not None:
        qk.copy_(rms_norm(qk, qk_norm, eps))
    qk.copy_(apply_rope(qk, cos, signed_sin))
    keys = qkv[:, num_qk - kv.shape[4] : num_qk]
    write_kv(keys, qkv[:, num_qk:], kv, layer, key_slots(slots, kv))


def capped(values: Tensor, cap: float) -> Tensor:
    """Applies soft-capping: values stay between -cap and cap; small ones hardly change.

    Source: Gemma 2, arXiv 2408.00118 §2.
    """
    return torch.tanh(values / cap) * cap


def chosen_product(x: Tensor, weights: Tensor, rows: Tensor, experts: Tensor) -> Tensor:
    """Multiplies each choice's row by its expert's weight; shapes do not depend on the choices.

    Copies the weight once per choice, so it is meant for few and small ones.

    Args:
        x: [any, depth].
        weights: [experts, columns, depth].
        rows, experts: [choices] int64.

    Returns:
        [choices, columns].
    """
    return (weights[experts] @ x[rows].unsqueeze(-1)).squeeze(-1)
