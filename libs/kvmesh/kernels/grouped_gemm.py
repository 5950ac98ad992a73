"""Multiplies rows by the weights of their experts, in one launch on CUDA.

Twin: `grouped_product` on the host. Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmesh.kernels.expert_tiles import ExpertTiles, TileShape

# Maximum tile width of fp32, which takes twice the shared memory.
_WIDEST_FP32 = 128


@triton.jit
def _grouped_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    x_ptr,
    weights_ptr,
    bias_ptr,
    shares_ptr,
    order_ptr,
    expert_ptr,
    first_ptr,
    end_ptr,
    out_ptr,
    depth,
    columns,
    top_k,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
    UPCAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BY_CHOICE: tl.constexpr,
):
    # One program: one tile of rows of one expert, COLUMN_TILE columns.
    tile = tl.program_id(0)
    place = tl.load(first_ptr + tile) + tl.arange(0, ROW_TILE)
    is_row = place < tl.load(end_ptr + tile)
    column = tl.program_id(1) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    is_column = column < columns
    choice = tl.load(order_ptr + place, mask=is_row, other=0)
    if BY_CHOICE:
        row = place
        target = choice
    else:
        row = choice // top_k
        target = place
    # int64 by its type: expert times weight size exceeds 2^31.
    expert = tl.load(expert_ptr + tile)
    step = tl.arange(0, DEPTH_TILE)
    acc = tl.zeros((ROW_TILE, COLUMN_TILE), tl.float32)
    # An unused tile has no rows; its expert is out of range and is not read.
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
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * columns + column, mask=is_column, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        if BY_CHOICE:
            share = tl.load(shares_ptr + choice, mask=is_row, other=0.0)
            acc *= share.to(tl.float32)[:, None]
        out = out_ptr + target[:, None] * columns + column[None, :]
        mask = is_row[:, None] & is_column[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


def grouped_gemm(
    x: Tensor,
    weights: Tensor,
    tiles: ExpertTiles,
    *,
    top_k: int = 1,
    shares: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiplies the rows of choices in the order of `tiles.order`; with shares, undoes the order.

    Args:
        x: [rows, depth], contiguous; with shares [choices, depth] in that order.
        weights: [experts, columns, depth], contiguous.
        top_k: number of choices per row.
        shares: [rows, top_k] any float dtype, weights of the choices.
        bias: [experts, columns], contiguous.

    Returns:
        [choices, columns], dtype of `x`; with shares multiplied by them, in the order of choices.
    """
    columns, depth = weights.shape[1:]
    shape = _for_values_of(tiles.shape, x.element_size())
    out = torch.empty((len(tiles.order), columns), dtype=x.dtype, device=x.device)
    _grouped_kernel[(len(tiles.expert), triton.cdiv(columns, shape.columns))](
        x,
        weights,
        x if bias is None else bias,
        x if shares is None else shares.contiguous(),
        tiles.order,
        tiles.expert,
        tiles.first,
        tiles.end,
        out,
        depth,
        columns,
        top_k,
        ROW_TILE=shape.rows,
        COLUMN_TILE=shape.columns,
        DEPTH_TILE=shape.depth,
        # Host tensors occur only under the interpreter.
        UPCAST=not x.is_cuda,
        HAS_BIAS=bias is not None,
        BY_CHOICE=shares is not None,
        num_warps=shape.warps,
    )
    return out


def _for_values_of(shape: TileShape, num_bytes: int) -> TileShape:
    if num_bytes < torch.float32.itemsize:
        return shape
    columns = min(shape.columns, _WIDEST_FP32)
    return TileShape(shape.rows, columns, shape.depth // 2, shape.warps)


def grouped_product(x: Tensor, weights: Tensor, rows: Tensor, experts: Tensor) -> Tensor:
    """Twin of `grouped_gemm` without shares.

    Args:
        rows: [choices] int64, row of `x` of each choice.
        experts: [choices] int64, expert of each choice, ascending.
    """
    counts = torch.bincount(experts, minlength=len(weights)).tolist()
    parts = torch.split(x[rows], counts)
    return torch.cat([part @ weight.T for part, weight in zip(parts, weights, strict=True)])
