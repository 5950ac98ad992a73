"""How the Triton kernels of linear states cut a state and find its rows, the same for all of them.

Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmesh.kernels.states import StatePlaces

_MOST_COLUMNS = 32
# Capabilities, by their first number, whose tensor cores read an operand from shared memory.
_WIDE = (9, 10)


def state_tiles(key_dim: int, value_dim: int) -> dict[str, int]:
    """Constants of a launch; a program has all rows of a state and VALUE_TILE of its columns."""
    return {
        "KEY_DIM": key_dim,
        "KEY_TILE": max(16, triton.next_power_of_2(key_dim)),
        "VALUE_DIM": value_dim,
        "VALUE_TILE": max(16, min(_MOST_COLUMNS, triton.next_power_of_2(value_dim))),
    }


def scan_launch(x: Tensor, value_dim: int) -> dict[str, int]:
    """Columns of a state per program and its warps, where states go from chunk to chunk.

    Elsewhere than on `_WIDE` both operands of a product are held in registers: of a state of 128
    rows more than 16 columns would spill (tests/unit/kernels/register_table.py).
    """
    # Only the interpreter runs on host tensors.
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
    """Rows and columns of a part of a state, where they are, and the offsets of their cells."""
    key = tl.arange(0, KEY_TILE)
    value = part * VALUE_TILE + tl.arange(0, VALUE_TILE)
    cell = state * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
    return key, value, key < KEY_DIM, value < VALUE_DIM, cell


@triton.jit
def state_pointers(  # type: ignore[no-untyped-def]
    field_ptr, source_ptr, live_ptr, sequence, stride_block, stride_source, stride_live
):
    """Where a sequence's state was, and where it will be."""
    # int64 by their type: block strides times block ids pass 2^31 in a large pool.
    source = tl.load(source_ptr + sequence * stride_source)
    live = tl.load(live_ptr + sequence * stride_live)
    return field_ptr + source * stride_block, field_ptr + live * stride_block


def place_arguments(places: StatePlaces) -> tuple[Tensor | int, ...]:
    """Of a kernel that reads and writes states where they are, in its order."""
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
    """Query, key and value of one head at one position."""
    is_key = key < KEY_DIM
    q = tl.load(q_ptr + row * KEY_DIM + key, mask=is_key, other=0.0)
    k = tl.load(k_ptr + row * KEY_DIM + key, mask=is_key, other=0.0)
    return q, k, tl.load(v_ptr + row * VALUE_DIM + value, mask=value < VALUE_DIM, other=0.0)


@triton.jit
def rows_of(position, num_positions, num_heads, head):  # type: ignore[no-untyped-def]
    """Rows of a head's positions, and which of them there are."""
    return position.to(tl.int64) * num_heads + head, position < num_positions


@triton.jit
def decays_between(decay, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is left at position i of what came at j, [i, j], and at the end of it, [j, 1].

    What lies between two positions is summed by itself: a difference of two totals that are large
    beside it would have few digits. Above the diagonal it is 1.

    Args:
        decay: [CHUNK] logarithms.
    """
    one = tl.arange(0, CHUNK)
    later = tl.where(one[:, None] > one[None, :], decay[:, None], 0.0)
    return tl.exp(tl.cumsum(later, 0)), tl.exp(tl.sum(later, 0))[:, None]


@triton.jit
def places_of(row, valid, column, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of columns of those rows, and their mask."""
    return row[:, None] * WIDTH + column[None, :], valid[:, None] & (column < WIDTH)[None, :]
