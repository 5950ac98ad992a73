"""Triton kernels of lightning attention: one position of many sequences, or many of one.

Twins: lightning_reference.py. Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmesh.kernels.state_tiles import (
    cells_of,
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
    slopes_ptr,
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
    slope = tl.load(slopes_ptr + head)
    state = state * tl.exp(-slope) + k[:, None] * v[None, :]
    tl.store(out_ptr + row * VALUE_DIM + value, tl.sum(state * q[:, None], 0), mask=is_value)
    tl.store(after + cell, state, mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
def _scan_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    q_ptr,
    k_ptr,
    v_ptr,
    slopes_ptr,
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
):
    # One program: one head, VALUE_TILE columns of the state, all positions in chunks.
    head = tl.program_id(0)
    key, value, is_key, is_value, cell = cells_of(
        head.to(tl.int64), tl.program_id(1), KEY_DIM, KEY_TILE, VALUE_DIM, VALUE_TILE
    )
    mask = is_key[:, None] & is_value[None, :]
    state = tl.load(state_ptr + cell, mask=mask, other=0.0)
    slope = tl.load(slopes_ptr + head)
    one = tl.arange(0, CHUNK)
    gap = tl.maximum(one[:, None] - one[None, :], 0).to(tl.float32)
    gaps = tl.where(one[:, None] >= one[None, :], tl.exp(-slope * gap), 0.0)
    since = tl.exp(-slope * (one + 1).to(tl.float32))[:, None]
    for start in range(0, num_positions, CHUNK):
        row, valid = rows_of(start + one, num_positions, num_heads, head)
        keys, key_mask = places_of(row, valid, key, KEY_DIM)
        q = tl.load(q_ptr + keys, mask=key_mask, other=0.0)
        k = tl.load(k_ptr + keys, mask=key_mask, other=0.0)
        values, value_mask = places_of(row, valid, value, VALUE_DIM)
        v = tl.load(v_ptr + values, mask=value_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * gaps
        out = tl.dot(q * since, state, input_precision="tf32x3")
        out += tl.dot(scores, v, input_precision="tf32x3")
        tl.store(out_ptr + values, out, mask=value_mask)
        # The last chunk may be short: the state decays only by the existing positions.
        count = tl.minimum(num_positions - start, CHUNK)
        behind = tl.maximum(count - 1 - one, 0).to(tl.float32)
        left = tl.exp(-slope * behind)[:, None]
        state = state * tl.exp(-slope * count.to(tl.float32))
        state += tl.dot(tl.trans(k * left), v, input_precision="tf32x3")
    tl.store(new_state_ptr + cell, state, mask=mask)


def lightning_step(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, places: StatePlaces) -> Tensor:
    """See `lightning_reference.lightning_step`; updates states in place.

    Returns:
        [sequences, heads, value_dim].
    """
    sequences, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    tiles = state_tiles(key_dim, value_dim)
    _step_kernel[(sequences, heads, triton.cdiv(value_dim, tiles["VALUE_TILE"]))](
        *(each.contiguous() for each in (q, k, v, slopes)),
        *place_arguments(places),
        out,
        heads,
        **tiles,
        num_warps=4,
    )
    return out


def lightning_scan(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `lightning_reference.lightning_scan`."""
    positions, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    new_state = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    launch = scan_launch(q, value_dim)
    _scan_kernel[(heads, triton.cdiv(value_dim, launch["VALUE_TILE"]))](
        *(each.contiguous() for each in (q, k, v, slopes, state)),
        out,
        new_state,
        positions,
        heads,
        **state_tiles(key_dim, value_dim) | launch,
        CHUNK=_CHUNK,
    )
    return out, new_state
