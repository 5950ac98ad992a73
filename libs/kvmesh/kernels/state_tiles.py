"""Tiles and addresses that the Triton kernels of linear states share.

Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmesh.kernels.states import StatePlaces

_MOST_COLUMNS = 32
# Major capabilities whose tensor cores read an operand from shared memory.
_WIDE = (9, 10)


def state_tiles(key_dim: int, value_dim: int) -> dict[str, int]:
    """Returns launch constants; a program has all rows of a state and VALUE_TILE of its columns."""
    return {
        "KEY_DIM": key_dim,
        "KEY_TILE": max(16, triton.next_power_of_2(key_dim)),
        "VALUE_DIM": value_dim,
        "VALUE_TILE": max(16, min(_MOST_COLUMNS, triton.next_power_of_2(value_dim))),
    }


def scan_launch(x: Tensor, value_dim: int) -> dict[str, int]:
    """Returns columns of a state per program, and warps, for kernels that scan chunks.

    Without `_WIDE` tensor cores both operands of a product are in registers: with 128 state rows,
    more than 16 columns would spill (tests/unit/kernels/register_table.py).
    """
    # Host tensors occur only under the interpreter.
    is_wide = not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] in _WIDE
    columns = _MOST_COLUMNS if is_wide else 16
    return {
        "VALUE_TILE": max(16, min(columns, triton.next_power_of_2(value_dim))),
        "num_warps": 4 if is_wide else 8,
    }


@triton.jit
def cells_of(  # type: ignore[no-untyped-def]
    state,
    part,
    KEY_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """Returns rows and columns of a part of a state, their masks, and the offsets of its cells."""
    key = tl.arange(0, KEY_TILE)
    value = part * VALUE_TILE + tl.arange(0, VALUE_TILE)
    cell = state * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
    return key, value, key < KEY_DIM, value < VALUE_DIM, cell


@triton.jit
def state_pointers(  # type: ignore[no-untyped-def]
    field_ptr, source_ptr, live_ptr, sequence, stride_block, stride_source, stride_live
):
    """Returns the pointers to a sequence's state before and after the step."""
    # int64 by their type: block stride times block id exceeds 2^31 in a large pool.
    source = tl.load(source_ptr + sequence * stride_source)
    live = tl.load(live_ptr + sequence * stride_live)
    return field_ptr + source * stride_block, field_ptr + live * stride_block


def place_arguments(places: StatePlaces) -> tuple[Tensor | int, ...]:
    """Returns the arguments of a kernel that updates states in place, in its order."""
    field, source, live = places.field, places.source, places.live
    assert field.stride(1) == 1, "a state's values follow one another"
    strides = (field.stride(0), source.stride(0), live.stride(0))
    return field, source, live, places.fresh, *strides


@triton.jit
def load_row(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    row,
    key,
    value,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Loads query, key and value of one head at one position."""
    is_key = key < KEY_DIM
    q = tl.load(q_ptr + row * KEY_DIM + key, mask=is_key, other=0.0)
    k = tl.load(k_ptr + row * KEY_DIM + key, mask=is_key, other=0.0)
    return q, k, tl.load(v_ptr + row * VALUE_DIM + value, mask=value < VALUE_DIM, other=0.0)


@triton.jit
def rows_of(position, num_positions, num_heads, head):  # type: ignore[no-untyped-def]
    """Returns the rows of a head's positions, and the mask of existing ones."""
    return position.to(tl.int64) * num_heads + head, position < num_positions


@triton.jit
def decays_between(decay, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the decay from position j to i, [i, j], and from j to the end, [j, 1].

    The decay between two positions is summed directly: as a difference of two large totals it
    would lose precision. Above the diagonal it is 1.

    Args:
        decay: [CHUNK] logarithms.
    """
    one = tl.arange(0, CHUNK)
    later = tl.where(one[:, None] > one[None, :], decay[:, None], 0.0)
    return tl.exp(tl.cumsum(later, 0)), tl.exp(tl.sum(later, 0))[:, None]


@triton.jit
def places_of(row, valid, column, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the offsets of columns of those rows, and their mask."""
    return row[:, None] * WIDTH + column[None, :], valid[:, None] & (column < WIDTH)[None, :]
