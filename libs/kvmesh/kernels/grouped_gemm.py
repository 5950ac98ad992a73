"""Products of rows with the weights of their experts, as one launch on CUDA.

Rows are cut into tiles of one expert each on the device, so that nothing waits for counts. Twin:
`grouped_product` on the host. Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TileShape:
    """What one program computes: rows and columns of the result, in steps of the depth."""

    rows: int
    columns: int
    depth: int
    warps: int


# The least rows that matrix units take: little is computed in vain where experts have few.
FEW_ROWS = TileShape(16, 64, 32, 4)
# A weight is read once per tile of rows: many rows must share it.
MANY_ROWS = TileShape(64, 128, 64, 8)
# From so many rows per expert on, on average.
_MANY = 48


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Rows by expert.

    Attributes:
        order: [rows * top_k] int64, choices (row * top_k + place) sorted by expert.
        expert: [tiles] int64; `num_experts` for a tile that is not used.
        first, end: [tiles] int64, places in `order`.
        shape: of all tiles.
    """

    order: Tensor
    expert: Tensor
    first: Tensor
    end: Tensor
    shape: TileShape


def tile_shape(num_choices: int, num_experts: int) -> TileShape:
    """Chosen by how many rows an expert has on average, which is known without a wait."""
    return MANY_ROWS if num_choices >= _MANY * num_experts else FEW_ROWS


def plan_tiles(chosen: Tensor, num_experts: int) -> ExpertTiles:
    """Sorts choices of experts, [rows, top_k] int64, into tiles; waits for nothing."""
    flat = chosen.flatten()
    shape = tile_shape(len(flat), num_experts)
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.index_add_(0, flat, torch.ones_like(flat))
    tiles = (counts + shape.rows - 1) // shape.rows
    tile_ends, row_ends = tiles.cumsum(0), counts.cumsum(0)
    # At most: every expert has one tile that is not full.
    bound = len(flat) // shape.rows + num_experts
    index = torch.arange(bound, device=flat.device)
    expert = torch.searchsorted(tile_ends, index, right=True)
    known = expert.clamp(max=num_experts - 1)
    within = index - (tile_ends - tiles)[known]
    first = (row_ends - counts)[known] + within * shape.rows
    end = torch.minimum(first + shape.rows, row_ends[known])
    return ExpertTiles(order, expert, first, torch.where(expert < num_experts, end, first), shape)


@triton.jit
def _grouped_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    x_ptr,
    weights_ptr,
    rows_ptr,
    expert_ptr,
    first_ptr,
    end_ptr,
    out_ptr,
    depth,
    columns,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # One program: one tile of rows of one expert, COLUMN_TILE columns.
    tile = tl.program_id(0)
    place = tl.load(first_ptr + tile) + tl.arange(0, ROW_TILE)
    is_row = place < tl.load(end_ptr + tile)
    column = tl.program_id(1) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    is_column = column < columns
    row = tl.load(rows_ptr + place, mask=is_row, other=0)
    # int64 by its type: expert times a weight passes 2^31.
    expert = tl.load(expert_ptr + tile)
    step = tl.arange(0, DEPTH_TILE)
    acc = tl.zeros((ROW_TILE, COLUMN_TILE), tl.float32)
    # A tile that is not used has no rows; its expert is past the last, and is not read.
    used = is_row.to(tl.int32)
    if tl.max(used, 0) > 0:
        base = weights_ptr + expert * depth * columns
        for start in range(0, depth, DEPTH_TILE):
            inner = start + step
            is_inner = inner < depth
            x = tl.load(
                x_ptr + row[:, None] * depth + inner[None, :],
                mask=is_row[:, None] & is_inner[None, :],
                other=0.0,
            )
            w = tl.load(
                base + column[:, None] * depth + inner[None, :],
                mask=is_column[:, None] & is_inner[None, :],
                other=0.0,
            )
            if UPCAST:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            acc += tl.dot(x, tl.trans(w), input_precision="tf32x3")
        out = out_ptr + place[:, None] * columns + column[None, :]
        mask = is_row[:, None] & is_column[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


def grouped_gemm(x: Tensor, weights: Tensor, rows: Tensor, tiles: ExpertTiles) -> Tensor:
    """Products in the order of `tiles.order`.

    Args:
        x: [any, depth], contiguous.
        weights: [experts, columns, depth], contiguous.
        rows: [choices] int64, row of `x` of each choice in that order.

    Returns:
        [choices, columns], dtype of `x`.
    """
    columns, depth = weights.shape[1:]
    shape = tiles.shape
    out = torch.empty((len(rows), columns), dtype=x.dtype, device=x.device)
    _grouped_kernel[(len(tiles.expert), triton.cdiv(columns, shape.columns))](
        x,
        weights,
        rows,
        tiles.expert,
        tiles.first,
        tiles.end,
        out,
        depth,
        columns,
        ROW_TILE=shape.rows,
        COLUMN_TILE=shape.columns,
        DEPTH_TILE=shape.depth,
        # Only the interpreter runs on host tensors.
        UPCAST=not x.is_cuda,
        num_warps=shape.warps,
    )
    return out


def grouped_product(x: Tensor, weights: Tensor, rows: Tensor, experts: Tensor) -> Tensor:
    """The twin of `grouped_gemm`.

    Args:
        experts: [choices] int64, of each choice, ascending.
    """
    counts = torch.bincount(experts, minlength=len(weights)).tolist()
    parts = torch.split(x[rows], counts)
    return torch.cat([part @ weight.T for part, weight in zip(parts, weights, strict=True)])
