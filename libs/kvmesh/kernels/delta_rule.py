"""Triton kernels of the gated delta rule: one position of many sequences, many of one sequence.

One decay per head (gated delta net) or one per channel (KDA). Twins: linear_reference.py.
Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmesh.kernels.state_tiles import state_tiles

_CHUNK = 16


@triton.jit
def _step_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    state_ptr,
    out_ptr,
    new_state_ptr,
    num_heads,
    KEY_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):
    # One program: one sequence, one head, VALUE_TILE columns of the state.
    row = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    key = tl.arange(0, KEY_TILE)
    value = tl.program_id(2) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    cell = row * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
    mask = is_key[:, None] & is_value[None, :]
    state = tl.load(state_ptr + cell, mask=mask, other=0.0)
    q = tl.load(q_ptr + row * KEY_DIM + key, mask=is_key, other=0.0)
    k = tl.load(k_ptr + row * KEY_DIM + key, mask=is_key, other=0.0)
    v = tl.load(v_ptr + row * VALUE_DIM + value, mask=is_value, other=0.0)
    if PER_CHANNEL:
        decay = tl.load(decay_ptr + row * KEY_DIM + key, mask=is_key, other=0.0)
        state = state * tl.exp(decay)[:, None]
    else:
        state = state * tl.exp(tl.load(decay_ptr + row))
    known = tl.sum(state * k[:, None], 0)
    change = (v - known) * tl.load(beta_ptr + row)
    state += k[:, None] * change[None, :]
    tl.store(out_ptr + row * VALUE_DIM + value, tl.sum(state * q[:, None], 0), mask=is_value)
    tl.store(new_state_ptr + cell, state, mask=mask)


@triton.jit
def _channel_products(q, k, total, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    # `k_i · k_j` and `q_i · k_j`, every channel decayed from j to i; column by column, because
    # decays must be subtracted before the exponential. Above the diagonal they mean nothing.
    one = tl.arange(0, CHUNK)
    products = tl.zeros((CHUNK, CHUNK), tl.float32)
    reads = tl.zeros((CHUNK, CHUNK), tl.float32)
    for column in range(CHUNK):
        here = one[:, None] == column
        key = tl.sum(tl.where(here, k, 0.0), 0)
        before = tl.sum(tl.where(here, total, 0.0), 0)
        decayed = key[None, :] * tl.exp(tl.minimum(total - before[None, :], 0.0))
        place = one[None, :] == column
        products = tl.where(place, tl.sum(k * decayed, 1)[:, None], products)
        reads = tl.where(place, tl.sum(q * decayed, 1)[:, None], reads)
    return products, reads


@triton.jit
def _scan_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    state_ptr,
    out_ptr,
    new_state_ptr,
    num_positions,
    num_heads,
    KEY_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):
    # One program: one head, VALUE_TILE columns of the state, all positions in chunks.
    head = tl.program_id(0)
    key = tl.arange(0, KEY_TILE)
    value = tl.program_id(1) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    cell = head.to(tl.int64) * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
    state = tl.load(state_ptr + cell, mask=is_key[:, None] & is_value[None, :], other=0.0)
    one = tl.arange(0, CHUNK)
    earlier = one[:, None] > one[None, :]
    for start in range(0, num_positions, CHUNK):
        position = start + one
        valid = position < num_positions
        row = position.to(tl.int64) * num_heads + head
        keys = row[:, None] * KEY_DIM + key[None, :]
        key_mask = valid[:, None] & is_key[None, :]
        q = tl.load(q_ptr + keys, mask=key_mask, other=0.0)
        k = tl.load(k_ptr + keys, mask=key_mask, other=0.0)
        values = row[:, None] * VALUE_DIM + value[None, :]
        value_mask = valid[:, None] & is_value[None, :]
        v = tl.load(v_ptr + values, mask=value_mask, other=0.0)
        # Positions past the end keep the state: they forget nothing and take no share.
        beta = tl.load(beta_ptr + row, mask=valid, other=0.0)
        if PER_CHANNEL:
            decay = tl.load(decay_ptr + keys, mask=key_mask, other=0.0)
            total = tl.cumsum(decay, 0)
            grown = tl.exp(total)
            last = tl.sum(decay, 0)
            left = tl.exp(last[None, :] - total)
            kept = tl.exp(last)[:, None]
            products, reads = _channel_products(q, k, total, CHUNK)
        else:
            decay = tl.load(decay_ptr + row, mask=valid, other=0.0)
            total = tl.cumsum(decay, 0)
            grown = tl.exp(total)[:, None]
            last = tl.sum(decay, 0)
            left = tl.exp(last - total)[:, None]
            kept = tl.exp(last)
            gap = tl.where(one[:, None] >= one[None, :], total[:, None] - total[None, :], 0.0)
            gaps = tl.exp(gap)
            products = tl.dot(k, tl.trans(k), input_precision="tf32x3") * gaps
            reads = tl.dot(q, tl.trans(k), input_precision="tf32x3") * gaps
        system = tl.where(earlier, products * beta[:, None], 0.0)
        # Inverse of the unit triangular system, row by row.
        inverse = tl.where(one[:, None] == one[None, :], 1.0, 0.0)
        for line in range(1, CHUNK):
            factors = tl.sum(tl.where(one[:, None] == line, system, 0.0), 0)
            known = tl.sum(factors[:, None] * inverse, 0)
            inverse = tl.where(one[:, None] == line, inverse - known[None, :], inverse)
        wanted = beta[:, None] * (v - tl.dot(k * grown, state, input_precision="tf32x3"))
        change = tl.dot(inverse, wanted, input_precision="tf32x3")
        reads = tl.where(one[:, None] >= one[None, :], reads, 0.0)
        out = tl.dot(q * grown, state, input_precision="tf32x3")
        out += tl.dot(reads, change, input_precision="tf32x3")
        tl.store(out_ptr + values, out, mask=value_mask)
        state = state * kept
        state += tl.dot(tl.trans(k * left), change, input_precision="tf32x3")
    tl.store(new_state_ptr + cell, state, mask=is_key[:, None] & is_value[None, :])


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `linear_reference.delta_step`; takes either kind of decay."""
    sequences, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    # Contiguous whatever the strides of `v` are: the kernel writes it so.
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    new_state = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    tiles = state_tiles(key_dim, value_dim)
    _step_kernel[(sequences, heads, triton.cdiv(value_dim, tiles["VALUE_TILE"]))](
        *(each.contiguous() for each in (q, k, v, decay, beta, state)),
        out,
        new_state,
        heads,
        **tiles,
        PER_CHANNEL=decay.shape[-1] > 1,
        num_warps=4,
    )
    return out, new_state


def delta_scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `linear_reference.delta_scan`; takes either kind of decay."""
    positions, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    new_state = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    tiles = state_tiles(key_dim, value_dim)
    _scan_kernel[(heads, triton.cdiv(value_dim, tiles["VALUE_TILE"]))](
        *(each.contiguous() for each in (q, k, v, decay, beta, state)),
        out,
        new_state,
        positions,
        heads,
        **tiles,
        CHUNK=_CHUNK,
        PER_CHANNEL=decay.shape[-1] > 1,
        num_warps=4,
    )
    return out, new_state
