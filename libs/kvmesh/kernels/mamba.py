"""Triton kernels of Mamba-2: one position of many sequences, or many of one sequence.

Twins: mamba_reference.py. Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmesh.kernels.state_tiles import (
    cells_of,
    decays_between,
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
    field_ptr,
    source_ptr,
    live_ptr,
    fresh_ptr,
    stride_block,
    stride_source,
    stride_live,
    out_ptr,
    num_heads,
    num_groups,
    SHARED: tl.constexpr,
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
    keys = (sequence * num_groups + head // SHARED) * KEY_DIM + key
    q = tl.load(q_ptr + keys, mask=is_key, other=0.0)
    k = tl.load(k_ptr + keys, mask=is_key, other=0.0)
    v = tl.load(v_ptr + row * VALUE_DIM + value, mask=is_value, other=0.0)
    state = state * tl.exp(tl.load(decay_ptr + row)) + k[:, None] * v[None, :]
    tl.store(out_ptr + row * VALUE_DIM + value, tl.sum(state * q[:, None], 0), mask=is_value)
    tl.store(after + cell, state, mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
def _prepare_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    reads_ptr,
    num_positions,
    num_groups,
    KEY_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # One program: `q_i · k_j` of one chunk of one group, the same for all its heads.
    one = tl.arange(0, CHUNK)
    position = tl.program_id(0) * CHUNK + one
    row, valid = rows_of(position, num_positions, num_groups, tl.program_id(1))
    keys, mask = places_of(row, valid, tl.arange(0, KEY_TILE), KEY_DIM)
    q = tl.load(q_ptr + keys, mask=mask, other=0.0)
    k = tl.load(k_ptr + keys, mask=mask, other=0.0)
    reads = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    tl.store(reads_ptr + row[:, None] * CHUNK + one[None, :], reads, mask=valid[:, None])


@triton.jit(do_not_specialize=_COUNTS)
def _scan_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    reads_ptr,
    state_ptr,
    out_ptr,
    new_state_ptr,
    num_positions,
    num_heads,
    num_groups,
    SHARED: tl.constexpr,
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
    one = tl.arange(0, CHUNK)
    for start in range(0, num_positions, CHUNK):
        row, valid = rows_of(start + one, num_positions, num_heads, head)
        shared_row, _ = rows_of(start + one, num_positions, num_groups, head // SHARED)
        keys, key_mask = places_of(shared_row, valid, key, KEY_DIM)
        values, value_mask = places_of(row, valid, value, VALUE_DIM)
        v = tl.load(v_ptr + values, mask=value_mask, other=0.0)
        # Positions past the end keep the state: they neither decay nor add.
        decay = tl.load(decay_ptr + row, mask=valid, other=0.0)
        gaps, left = decays_between(decay, CHUNK)
        shares = shared_row[:, None] * CHUNK + one[None, :]
        reads = tl.load(reads_ptr + shares, mask=valid[:, None], other=0.0)
        scores = tl.where(one[:, None] >= one[None, :], reads * gaps, 0.0)
        q = tl.load(q_ptr + keys, mask=key_mask, other=0.0)
        # Row factors are applied to the smaller operand.
        since = tl.exp(tl.cumsum(decay, 0))[:, None]
        out = tl.dot(q, state, input_precision="tf32x3") * since
        out += tl.dot(scores, v, input_precision="tf32x3")
        tl.store(out_ptr + values, out, mask=value_mask)
        k = tl.load(k_ptr + keys, mask=key_mask, other=0.0)
        state = state * tl.exp(tl.sum(decay, 0))
        state += tl.dot(tl.trans(k), v * left, input_precision="tf32x3")
    tl.store(new_state_ptr + cell, state, mask=mask)


def mamba_step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, places: StatePlaces) -> Tensor:
    """See `mamba_reference.mamba_step`; updates states in place.

    Returns:
        [sequences, heads, value_dim].
    """
    sequences, groups, key_dim = q.shape
    _, heads, value_dim = v.shape
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    tiles = state_tiles(key_dim, value_dim)
    _step_kernel[(sequences, heads, triton.cdiv(value_dim, tiles["VALUE_TILE"]))](
        *(each.contiguous() for each in (q, k, v, decay)),
        *place_arguments(places),
        out,
        heads,
        groups,
        SHARED=heads // groups,
        **tiles,
        num_warps=4,
    )
    return out


def mamba_scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `mamba_reference.mamba_scan`."""
    positions, groups, key_dim = q.shape
    _, heads, value_dim = v.shape
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    new_state = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    q, k = q.contiguous(), k.contiguous()
    reads = torch.empty((positions, groups, _CHUNK), dtype=q.dtype, device=q.device)
    tiles, launch = state_tiles(key_dim, value_dim), scan_launch(q, value_dim)
    _prepare_kernel[(triton.cdiv(positions, _CHUNK), groups)](
        q,
        k,
        reads,
        positions,
        groups,
        KEY_DIM=key_dim,
        KEY_TILE=tiles["KEY_TILE"],
        CHUNK=_CHUNK,
        num_warps=4,
    )
    _scan_kernel[(heads, triton.cdiv(value_dim, launch["VALUE_TILE"]))](
        *(each.contiguous() for each in (q, k, v, decay, reads, state)),
        out,
        new_state,
        positions,
        heads,
        groups,
        SHARED=heads // groups,
        **tiles | launch,
        CHUNK=_CHUNK,
        num_stages=2,
    )
    return out, new_state
