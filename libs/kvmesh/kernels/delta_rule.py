"""Triton kernels of the gated delta rule: one position of many sequences, or many of one.

One decay per head (gated delta net) or one per channel (KDA). Twins: linear_reference.py.
Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmesh.kernels.state_tiles import (
    cells_of,
    decays_between,
    load_row,
    place_arguments,
    places_of,
    rows_of,
    scan_launch,
    state_pointers,
    state_tiles,
)
from kvmesh.kernels.states import StatePlaces

_CHUNK = 16
# Prompt lengths vary: not specialised, so that one compiled kernel serves all.
_COUNTS = ("num_positions",)


@triton.jit
def _step_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    field_ptr,
    source_ptr,
    live_ptr,
    fresh_ptr,
    stride_block,
    stride_source,
    stride_live,
    out_ptr,
    num_heads,
    KEY_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):
    # One program: one sequence, one head, VALUE_TILE columns of the state.
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = sequence * num_heads + head
    key, value, is_key, is_value, cell = cells_of(
        head, tl.program_id(2), KEY_DIM, KEY_TILE, VALUE_DIM, VALUE_TILE
    )
    mask = is_key[:, None] & is_value[None, :]
    before, after = state_pointers(
        field_ptr, source_ptr, live_ptr, sequence, stride_block, stride_source, stride_live
    )
    state = tl.load(before + cell, mask=mask, other=0.0)
    state = tl.where(tl.load(fresh_ptr + sequence), 0.0, state)
    q, k, v = load_row(q_ptr, k_ptr, v_ptr, row, key, value, KEY_DIM, VALUE_DIM)
    if PER_CHANNEL:
        decay = tl.load(decay_ptr + row * KEY_DIM + key, mask=is_key, other=0.0)
        state = state * tl.exp(decay)[:, None]
    else:
        state = state * tl.exp(tl.load(decay_ptr + row))
    known = tl.sum(state * k[:, None], 0)
    change = (v - known) * tl.load(beta_ptr + row)
    state += k[:, None] * change[None, :]
    tl.store(out_ptr + row * VALUE_DIM + value, tl.sum(state * q[:, None], 0), mask=is_value)
    tl.store(after + cell, state, mask=mask)


@triton.jit
def _channel_products(q, k, decay, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    # `k_i · k_j` and `q_i · k_j` with every channel decayed from j to i, and each channel's decay
    # to the end. Computed column by column from the last. The decay between two positions is summed
    # directly: as a difference of two large totals it would lose precision. Values above the
    # diagonal are meaningless.
    one = tl.arange(0, CHUNK)
    products = tl.zeros((CHUNK, CHUNK), tl.float32)
    reads = tl.zeros((CHUNK, CHUNK), tl.float32)
    gap = tl.zeros_like(k)
    after = tl.zeros_like(k)
    following = tl.sum(gap, 0)
    for step in range(CHUNK):
        column = CHUNK - 1 - step
        here = one[:, None] == column
        gap = tl.where(one[:, None] > column, gap + following[None, :], 0.0)
        after = tl.where(one[:, None] <= column, after + following[None, :], after)
        key = tl.sum(tl.where(here, k, 0.0), 0)
        decayed = key[None, :] * tl.exp(gap)
        place = one[None, :] == column
        products = tl.where(place, tl.sum(k * decayed, 1)[:, None], products)
        reads = tl.where(place, tl.sum(q * decayed, 1)[:, None], reads)
        following = tl.sum(tl.where(here, decay, 0.0), 0)
    return products, reads, after


@triton.jit(do_not_specialize=_COUNTS)
def _prepare_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    known_keys_ptr,
    wanted_ptr,
    late_q_ptr,
    late_k_ptr,
    reads_ptr,
    kept_ptr,
    num_positions,
    num_heads,
    KEY_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):
    # One program: one chunk of one head, everything that does not depend on the state before it.
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    key = tl.arange(0, KEY_TILE)
    value = tl.arange(0, VALUE_TILE)
    one = tl.arange(0, CHUNK)
    row, valid = rows_of(chunk * CHUNK + one, num_positions, num_heads, head)
    keys, key_mask = places_of(row, valid, key, KEY_DIM)
    k = tl.load(k_ptr + keys, mask=key_mask, other=0.0)
    # Positions past the end keep the state: no decay, and beta 0.
    beta = tl.load(beta_ptr + row, mask=valid, other=0.0)
    place = chunk * num_heads + head
    if PER_CHANNEL:
        decay = tl.load(decay_ptr + keys, mask=key_mask, other=0.0)
        grown = tl.exp(tl.cumsum(decay, 0))
        last = tl.sum(decay, 0)
        tl.store(kept_ptr + place * KEY_DIM + key, tl.exp(last), mask=key < KEY_DIM)
        q = tl.load(q_ptr + keys, mask=key_mask, other=0.0)
        products, reads, after = _channel_products(q, k, decay, CHUNK)
        tl.store(late_k_ptr + keys, k * tl.exp(after), mask=key_mask)
    else:
        decay = tl.load(decay_ptr + row, mask=valid, other=0.0)
        grown = tl.exp(tl.cumsum(decay, 0))[:, None]
        tl.store(kept_ptr + place, tl.exp(tl.sum(decay, 0)))
        gaps, left = decays_between(decay, CHUNK)
        tl.store(late_k_ptr + keys, k * left, mask=key_mask)
        products = tl.dot(k, tl.trans(k), input_precision="tf32x3") * gaps
        # Not loaded before: registers are short.
        q = tl.load(q_ptr + keys, mask=key_mask, other=0.0)
        reads = tl.dot(q, tl.trans(k), input_precision="tf32x3") * gaps
    tl.store(late_q_ptr + keys, q * grown, mask=key_mask)
    reads = tl.where(one[:, None] >= one[None, :], reads, 0.0)
    tl.store(reads_ptr + row[:, None] * CHUNK + one[None, :], reads, mask=valid[:, None])
    system = tl.where(one[:, None] > one[None, :], products * beta[:, None], 0.0)
    # Inverse of the unit triangular system, row by row.
    inverse = tl.where(one[:, None] == one[None, :], 1.0, 0.0)
    for line in range(1, CHUNK):
        factors = tl.sum(tl.where(one[:, None] == line, system, 0.0), 0)
        known = tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where(one[:, None] == line, inverse - known[None, :], inverse)
    known_keys = tl.dot(inverse, k * grown * beta[:, None], input_precision="tf32x3")
    tl.store(known_keys_ptr + keys, known_keys, mask=key_mask)
    values, value_mask = places_of(row, valid, value, VALUE_DIM)
    v = tl.load(v_ptr + values, mask=value_mask, other=0.0)
    wanted = tl.dot(inverse, v * beta[:, None], input_precision="tf32x3")
    tl.store(wanted_ptr + values, wanted, mask=value_mask)


@triton.jit(do_not_specialize=_COUNTS)
def _scan_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    known_keys_ptr,
    late_q_ptr,
    late_k_ptr,
    reads_ptr,
    kept_ptr,
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
    # One program: one head, VALUE_TILE columns of the state, all positions in chunks. `out` holds
    # the result for a zero state.
    head = tl.program_id(0)
    key, value, is_key, is_value, cell = cells_of(
        head.to(tl.int64), tl.program_id(1), KEY_DIM, KEY_TILE, VALUE_DIM, VALUE_TILE
    )
    mask = is_key[:, None] & is_value[None, :]
    state = tl.load(state_ptr + cell, mask=mask, other=0.0)
    one = tl.arange(0, CHUNK)
    for start in range(0, num_positions, CHUNK):
        row, valid = rows_of(start + one, num_positions, num_heads, head)
        keys, key_mask = places_of(row, valid, key, KEY_DIM)
        values, value_mask = places_of(row, valid, value, VALUE_DIM)
        known_keys = tl.load(known_keys_ptr + keys, mask=key_mask, other=0.0)
        change = tl.load(out_ptr + values, mask=value_mask, other=0.0)
        change -= tl.dot(known_keys, state, input_precision="tf32x3")
        q = tl.load(late_q_ptr + keys, mask=key_mask, other=0.0)
        out = tl.dot(q, state, input_precision="tf32x3")
        shares = row[:, None] * CHUNK + one[None, :]
        reads = tl.load(reads_ptr + shares, mask=valid[:, None], other=0.0)
        out += tl.dot(reads, change, input_precision="tf32x3")
        tl.store(out_ptr + values, out, mask=value_mask)
        place = (start // CHUNK) * num_heads + head
        if PER_CHANNEL:
            kept = tl.load(kept_ptr + place * KEY_DIM + key, mask=is_key, other=0.0)[:, None]
        else:
            kept = tl.load(kept_ptr + place)
        k = tl.load(late_k_ptr + keys, mask=key_mask, other=0.0)
        state = state * kept
        state += tl.dot(tl.trans(k), change, input_precision="tf32x3")
    tl.store(new_state_ptr + cell, state, mask=mask)


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, places: StatePlaces
) -> Tensor:
    """See `linear_reference.delta_step`; takes either kind of decay, and updates states in place.

    Returns:
        [sequences, heads, value_dim].
    """
    sequences, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    # Contiguous, whatever the strides of `v` are, since the kernel writes it so.
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    tiles = state_tiles(key_dim, value_dim)
    _step_kernel[(sequences, heads, triton.cdiv(value_dim, tiles["VALUE_TILE"]))](
        *(each.contiguous() for each in (q, k, v, decay, beta)),
        *place_arguments(places),
        out,
        heads,
        **tiles,
        PER_CHANNEL=decay.shape[-1] > 1,
        num_warps=4,
    )
    return out


def delta_scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `linear_reference.delta_scan`; takes either kind of decay.

    One kernel computes everything that does not depend on the state, for all chunks at once. A
    second kernel carries the state from chunk to chunk.
    """
    positions, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    like: dict[str, Any] = {"dtype": q.dtype, "device": q.device}
    out = torch.empty(v.shape, **like)
    known_keys, late_q, late_k = (torch.empty(q.shape, **like) for _ in range(3))
    reads = torch.empty((positions, heads, _CHUNK), **like)
    num_chunks = triton.cdiv(positions, _CHUNK)
    kept = torch.empty((num_chunks, heads, decay.shape[-1]), **like)
    new_state = torch.empty(state.shape, **like)
    tiles = state_tiles(key_dim, value_dim)
    constants = {"CHUNK": _CHUNK, "PER_CHANNEL": decay.shape[-1] > 1}
    whole = {"VALUE_TILE": max(16, triton.next_power_of_2(value_dim))}
    _prepare_kernel[(num_chunks, heads)](
        *(each.contiguous() for each in (q, k, v, decay, beta)),
        known_keys,
        out,
        late_q,
        late_k,
        reads,
        kept,
        positions,
        heads,
        **tiles | whole | constants,
        num_warps=8,
    )
    launch = scan_launch(q, value_dim)
    _scan_kernel[(heads, triton.cdiv(value_dim, launch["VALUE_TILE"]))](
        known_keys,
        late_q,
        late_k,
        reads,
        kept,
        state.contiguous(),
        out,
        new_state,
        positions,
        heads,
        **tiles | launch | constants,
        num_stages=2,
    )
    return out, new_state
