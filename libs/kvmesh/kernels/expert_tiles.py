"""Sorts expert choices into tiles of rows with one expert each, on the device, without reading
counts back. One launch instead of two dozen sorts a few choices, such as a decode step's.

Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmesh.kernels.device_limits import MOST_SHARED_BYTES, shared_memory_bytes


@dataclass(frozen=True, slots=True)
class TileShape:
    """Tile of one program: rows and columns of the result, and steps of the depth.

    Attributes:
        depth: step of the depth for two-byte values.
    """

    rows: int
    columns: int
    depth: int
    warps: int


# Tiles by the average number of rows per expert, as vLLM's tuning found on an H200 for 128 experts
# of 768 (`fused_moe/configs/E=128,N=768,device_name=NVIDIA_H200.json`).
# The fewest rows of the matrix units, so that little is padding if experts have few rows.
FEW_ROWS = TileShape(16, 64, 128, 4)
# Each tile of rows reads the weight once, so many rows share it.
MANY_ROWS = TileShape(64, 128, 64, 4)
MOST_ROWS = TileShape(128, 256, 64, 8)
_MANY, _MOST = 24, 64
# Shared memory of a program with `MOST_ROWS` and pipelined loads.
_MOST_ROWS_BYTES = 200 << 10
# With more choices, one program would count longer than the saved launches take.
_FEW_CHOICES = 4096
# Number of choices that a program places, number of choices that it compares them with at once, and
# number of (choice, expert) pairs compared at once.
_OWN, _OTHERS, _PAIRS = 64, 64, 8192


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Rows sorted by expert and cut into tiles.

    Attributes:
        order: [rows * top_k] int64, choices (row * top_k + place) sorted by expert.
        expert: [tiles] int64; `num_experts` for an unused tile.
        first, end: [tiles] int64, places in `order`; `end` is not above `first` for an unused tile.
        shape: shape of all tiles.
    """

    order: Tensor
    expert: Tensor
    first: Tensor
    end: Tensor
    shape: TileShape


def tile_shape(num_choices: int, num_experts: int, shared_bytes: int) -> TileShape:
    """Returns the tile shape for the average number of rows per expert, known without waiting.

    Args:
        shared_bytes: maximum shared memory of a program.
    """
    if num_choices < _MANY * num_experts:
        return FEW_ROWS
    if num_choices < _MOST * num_experts or shared_bytes < _MOST_ROWS_BYTES:
        return MANY_ROWS
    return MOST_ROWS


def shape_for(chosen: Tensor, num_experts: int) -> TileShape:
    """Returns the `tile_shape` of choices that are on a device."""
    # Host tensors occur only under the interpreter.
    shared = shared_memory_bytes(chosen.device) if chosen.is_cuda else MOST_SHARED_BYTES
    return tile_shape(chosen.numel(), num_experts, shared)


def plan_tiles(chosen: Tensor, num_experts: int) -> ExpertTiles:
    """Sorts expert choices, [rows, top_k] int64, into tiles; never waits."""
    plan = plan_few if chosen.numel() <= _FEW_CHOICES else plan_many
    return plan(chosen.flatten(), num_experts, shape_for(chosen, num_experts))


def _most_tiles(num_choices: int, num_experts: int, shape: TileShape) -> int:
    # Every expert has at most one tile that is not full.
    return num_choices // shape.rows + num_experts


def plan_many(flat: Tensor, num_experts: int, shape: TileShape) -> ExpertTiles:
    """Variant of `plan_tiles` by torch operations; the twin of `plan_few`.

    Args:
        flat: [choices] int64.
    """
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.index_add_(0, flat, torch.ones_like(flat))
    tiles = (counts + shape.rows - 1) // shape.rows
    tile_ends, row_ends = tiles.cumsum(0), counts.cumsum(0)
    index = torch.arange(_most_tiles(len(flat), num_experts, shape), device=flat.device)
    expert = torch.searchsorted(tile_ends, index, right=True)
    known = expert.clamp(max=num_experts - 1)
    within = index - (tile_ends - tiles)[known]
    first = (row_ends - counts)[known] + within * shape.rows
    end = torch.minimum(first + shape.rows, row_ends[known])
    return ExpertTiles(order, expert, first, torch.where(expert < num_experts, end, first), shape)


@triton.jit
def _write_order(  # type: ignore[no-untyped-def]
    chosen_ptr, order_ptr, num_choices, begin, OWN: tl.constexpr, OTHERS: tl.constexpr
):
    # A choice's place is the number of choices before it: those of lower experts, and earlier ones
    # of its own expert.
    own = begin + tl.arange(0, OWN)
    is_own = own < num_choices
    mine = tl.load(chosen_ptr + own, mask=is_own, other=0).to(tl.int32)
    place = tl.zeros((OWN,), tl.int32)
    for start in range(0, num_choices, OTHERS):
        other = start + tl.arange(0, OTHERS)
        is_other = other < num_choices
        theirs = tl.load(chosen_ptr + other, mask=is_other, other=0).to(tl.int32)
        is_earlier = (theirs[None, :] == mine[:, None]) & (other[None, :] < own[:, None])
        is_before = is_other[None, :] & ((theirs[None, :] < mine[:, None]) | is_earlier)
        place += tl.sum(is_before.to(tl.int32), 1)
    tl.store(order_ptr + place, own.to(tl.int64), mask=is_own)


@triton.jit
def _write_tiles(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - part of a kernel
    chosen_ptr,
    expert_ptr,
    first_ptr,
    end_ptr,
    num_choices,
    num_tiles,
    num_experts,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    expert = tl.arange(0, EXPERTS)
    one = tl.arange(0, CHUNK)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_choices, CHUNK):
        is_choice = start + one < num_choices
        # EXPERTS marks missing choices, since no expert has this number.
        chosen = tl.load(chosen_ptr + start + one, mask=is_choice, other=EXPERTS).to(tl.int32)
        counts += tl.sum((expert[:, None] == chosen[None, :]).to(tl.int32), 1)
    tiles = (counts + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(tiles, 0)
    row_ends = tl.cumsum(counts, 0)
    for start in range(0, num_tiles, CHUNK):
        index = start + one
        # Number of experts all of whose tiles come before.
        known = tl.sum((tile_ends[:, None] <= index[None, :]).to(tl.int32), 0)
        is_it = expert[:, None] == known[None, :]
        tile_begin = tl.sum(tl.where(is_it, (tile_ends - tiles)[:, None], 0), 0)
        row_begin = tl.sum(tl.where(is_it, (row_ends - counts)[:, None], 0), 0)
        row_end = tl.sum(tl.where(is_it, row_ends[:, None], 0), 0)
        is_used = known < num_experts
        first = tl.where(is_used, row_begin + (index - tile_begin) * ROWS, 0)
        end = tl.where(is_used, tl.minimum(first + ROWS, row_end), 0)
        is_tile = index < num_tiles
        known = tl.minimum(known, num_experts)
        tl.store(expert_ptr + index, known.to(tl.int64), mask=is_tile)
        tl.store(first_ptr + index, first.to(tl.int64), mask=is_tile)
        tl.store(end_ptr + index, end.to(tl.int64), mask=is_tile)


@triton.jit(do_not_specialize=["num_choices", "num_tiles"])
def _plan_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    chosen_ptr,
    order_ptr,
    expert_ptr,
    first_ptr,
    end_ptr,
    num_choices,
    num_tiles,
    num_experts,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    OWN: tl.constexpr,
    OTHERS: tl.constexpr,
):
    # The first program cuts the tiles, each other one places OWN choices.
    program = tl.program_id(0)
    if program == 0:
        _write_tiles(
            chosen_ptr,
            expert_ptr,
            first_ptr,
            end_ptr,
            num_choices,
            num_tiles,
            num_experts,
            ROWS,
            EXPERTS,
            CHUNK,
        )
    else:
        _write_order(chosen_ptr, order_ptr, num_choices, (program - 1) * OWN, OWN, OTHERS)


def plan_few(flat: Tensor, num_experts: int, shape: TileShape) -> ExpertTiles:
    """Variant of `plan_many` in one launch."""
    order = torch.empty_like(flat)
    num_tiles = _most_tiles(len(flat), num_experts, shape)
    expert, first, end = (flat.new_empty(num_tiles) for _ in range(3))
    experts = triton.next_power_of_2(num_experts)
    _plan_kernel[(1 + triton.cdiv(len(flat), _OWN),)](
        flat,
        order,
        expert,
        first,
        end,
        len(flat),
        num_tiles,
        num_experts,
        ROWS=shape.rows,
        EXPERTS=experts,
        CHUNK=max(16, min(_OTHERS, _PAIRS // experts)),
        OWN=_OWN,
        OTHERS=_OTHERS,
        num_warps=8,
    )
    return ExpertTiles(order, expert, first, end, shape)
