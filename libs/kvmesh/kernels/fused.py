"""Triton kernels between the matrix products of a layer: norm with residual, gated activation,
rotary embedding with the KV write.

Everything is computed in fp32 and rounded once. Twins: reference.py.
Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ACTIVATION_TILE = 1024


@triton.jit
def _add_to_stream(x, delta, mask, HAS_DELTA: tl.constexpr):  # type: ignore[no-untyped-def]
    # Returns the stream's new value in fp32, rounded as it is stored.
    value = tl.load(x, mask=mask, other=0.0)
    if HAS_DELTA:
        added = tl.load(delta, mask=mask, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(x, value, mask=mask)
    return value.to(tl.float32)


@triton.jit
def _add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    dim,
    eps,
    TILE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    # One program: one row.
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = column < dim
    x = _add_to_stream(x_ptr + row * dim + column, delta_ptr + row * dim + column, mask, HAS_DELTA)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / dim + eps)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    normed = (x * factor * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * dim + column, normed, mask=mask)


@triton.jit
def _add_layer_norm_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    x_ptr,
    delta_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    dim,
    eps,
    TILE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    # One program: one row.
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = column < dim
    x = _add_to_stream(x_ptr + row * dim + column, delta_ptr + row * dim + column, mask, HAS_DELTA)
    # Padding columns must not contribute to the variance.
    centred = tl.where(mask, x - tl.sum(x, 0) / dim, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / dim + eps)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    normed = (centred * factor * weight + bias).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * dim + column, normed, mask=mask)


@triton.jit
def _silu_and_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr,
    out_ptr,
    dim,
    TILE: tl.constexpr,
):
    # One program: one tile of one row.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < dim
    gate = tl.load(gate_up_ptr + row * 2 * dim + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * dim + dim + column, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * dim + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_and_write_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    qkv_ptr,
    qk_norm_ptr,
    cos_ptr,
    sin_ptr,
    kv_ptr,
    slots_ptr,
    eps,
    num_heads,
    stride_block,
    stride_value,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_TILE: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    # One program: one head of one row. Queries are rotated, keys rotated and written, values
    # written.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, HALF_TILE)
    mask = half < HEAD_DIM // 2
    own = qkv_ptr + (row * tl.num_programs(1) + head) * HEAD_DIM
    low = tl.load(own + half, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(own + HEAD_DIM // 2 + half, mask=mask, other=0.0).to(tl.float32)
    num_turned = num_heads + KV_HEADS
    if head < num_turned:
        if HAS_NORM:
            squares = tl.sum(low * low + high * high, 0)
            factor = 1.0 / tl.sqrt(squares / HEAD_DIM + eps)
            weight = qk_norm_ptr + head * HEAD_DIM
            low = low * factor * tl.load(weight + half, mask=mask, other=0.0).to(tl.float32)
            upper = tl.load(weight + HEAD_DIM // 2 + half, mask=mask, other=0.0)
            high = high * factor * upper.to(tl.float32)
        # The first half of the sines is stored negated.
        cos = tl.load(cos_ptr + row * HEAD_DIM + half, mask=mask, other=0.0).to(tl.float32)
        sin = -tl.load(sin_ptr + row * HEAD_DIM + half, mask=mask, other=0.0).to(tl.float32)
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
        tl.store(own + half, low.to(qkv_ptr.dtype.element_ty), mask=mask)
        tl.store(own + HEAD_DIM // 2 + half, high.to(qkv_ptr.dtype.element_ty), mask=mask)
    if head >= num_heads:
        slot = tl.load(slots_ptr + row)
        is_value = head >= num_turned
        kv_head = tl.where(is_value, head - num_turned, head - num_heads)
        to = kv_ptr + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot
        to += kv_head * HEAD_DIM + tl.where(is_value, stride_value, 0)
        tl.store(to + half, low.to(kv_ptr.dtype.element_ty), mask=mask)
        tl.store(to + HEAD_DIM // 2 + half, high.to(kv_ptr.dtype.element_ty), mask=mask)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `reference.add_rms_norm`; tensors are contiguous, `x` is changed in place."""
    out = torch.empty_like(x)
    rows, dim = x.shape
    _add_rms_norm_kernel[(rows,)](
        x,
        x if delta is None else delta,
        weight,
        out,
        dim,
        eps,
        TILE=triton.next_power_of_2(dim),
        HAS_DELTA=delta is not None,
        num_warps=8 if dim > 2048 else 4,
    )
    return out


def add_layer_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """See `reference.add_layer_norm`; tensors are contiguous, `x` is changed in place."""
    out = torch.empty_like(x)
    rows, dim = x.shape
    _add_layer_norm_kernel[(rows,)](
        x,
        x if delta is None else delta,
        weight,
        bias,
        out,
        dim,
        eps,
        TILE=triton.next_power_of_2(dim),
        HAS_DELTA=delta is not None,
        num_warps=8 if dim > 2048 else 4,
    )
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_and_mul`; `gate_up` is [rows, 2 * dim], contiguous."""
    rows, columns = gate_up.shape
    dim = columns // 2
    out = gate_up.new_empty(rows, dim)
    grid = (rows, triton.cdiv(dim, _ACTIVATION_TILE))
    _silu_and_mul_kernel[grid](gate_up, out, dim, TILE=_ACTIVATION_TILE, num_warps=4)
    return out


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
    """See `reference.rope_and_write`; tensors are contiguous, `qkv` and `kv` change in place."""
    rows, heads, head_dim = qkv.shape
    kv_heads = kv.shape[4]
    pool = kv[:, layer]
    _rope_and_write_kernel[(rows, heads)](
        qkv,
        qkv if qk_norm is None else qk_norm,
        cos,
        signed_sin,
        pool,
        slots,
        eps,
        heads - 2 * kv_heads,
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        BLOCK_SIZE=kv.shape[3],
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF_TILE=triton.next_power_of_2(head_dim // 2),
        HAS_NORM=qk_norm is not None,
        num_warps=1,
    )
