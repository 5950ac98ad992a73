"""Triton kernel that merges attention over parts of contexts, in one launch.

Twin: attention_reference.merge_partials. Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Number of part values that a program holds.
_TILE_VALUES = 4096


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    parts_ptr,
    lse_ptr,
    sinks_ptr,
    out_ptr,
    num_splits,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    # One program: one head of one sequence.
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head
    dim = tl.arange(0, DIM_TILE)
    split = tl.arange(0, SPLIT_TILE)
    # Below any score, so that parts without positions, whose lse is -inf, have weight zero.
    highest = tl.full((1,), -1e30, tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((DIM_TILE,), tl.float32)
    for start in range(0, num_splits, SPLIT_TILE):
        part = row * num_splits + start + split
        is_part = start + split < num_splits
        lse = tl.load(lse_ptr + part, mask=is_part, other=float("-inf"))
        values = tl.load(
            parts_ptr + part[:, None] * DIM + dim[None, :],
            mask=is_part[:, None] & (dim[None, :] < DIM),
            other=0.0,
        )
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        weights = tl.exp(lse - new_highest)
        rescale = tl.exp(highest - new_highest)
        total = total * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(values * weights[:, None], 0)
        highest = new_highest
    if HAS_SINKS:
        # The sink is a score without a position that takes a share of the softmax.
        sink = tl.load(sinks_ptr + head)
        new_highest = tl.maximum(highest, sink)
        rescale = tl.exp(highest - new_highest)
        total = total * rescale + tl.exp(sink - new_highest)
        acc = acc * rescale
    tl.store(out_ptr + row * DIM + dim, (acc / total).to(out_ptr.dtype.element_ty), mask=dim < DIM)


def merged(parts: Tensor, lse: Tensor, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    """Merges parts, at least one of which holds a position.

    Args:
        parts: [sequences, heads, parts, dim] fp32, each normalised over its own part; contiguous.
        lse: [sequences, heads, parts] fp32, log of the sum of exponentials; -inf for an empty part.
        sinks: [heads] fp32, see `attention_reference.decode_attention`.

    Returns:
        [sequences, heads, dim].
    """
    sequences, heads, num_splits, dim = parts.shape
    out = torch.empty((sequences, heads, dim), dtype=dtype, device=parts.device)
    tile = max(16, triton.next_power_of_2(dim))
    _merge_kernel[(sequences, heads)](
        parts,
        lse,
        lse if sinks is None else sinks,
        out,
        num_splits,
        DIM=dim,
        DIM_TILE=tile,
        SPLIT_TILE=max(1, _TILE_VALUES // tile),
        HAS_SINKS=sinks is not None,
        num_warps=4,
    )
    return out
