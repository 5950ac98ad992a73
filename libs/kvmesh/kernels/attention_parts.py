"""What Triton kernels of attention share: where positions lie, and the softmax that runs on.

Scores come times log2(e). Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def part_of(lens_ptr, sequence, split, num_splits, split_len, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The context's length, and where this part of it begins and would end."""
    context_len = tl.load(lens_ptr + sequence).to(tl.int32)
    # Unless it is given, every context is cut by its own length.
    own_len = tl.cdiv(tl.cdiv(context_len, num_splits), TILE) * TILE
    split_len = tl.where(split_len > 0, split_len, own_len)
    first = split * split_len
    return context_len, first, first + split_len


@triton.jit
def slots_of(  # type: ignore[no-untyped-def]
    table_ptr, position, valid, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr
):
    """Where positions of a sequence lie in the pool, by its block table."""
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=valid, other=0)
    # int64: block strides times block ids pass 2^31 in a large pool.
    return block.to(tl.int64) * stride_block + (position % BLOCK_SIZE) * stride_slot


@triton.jit
def scores_of(q, k, scale, cap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores of a tile, with the factors that `score_factors` gives."""
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
    if HAS_CAP:
        # tanh(x) is 2 * sigmoid(2 * x) - 1.
        scores = (2.0 * tl.sigmoid(2.0 * scores) - 1.0) * cap
    return scores


def score_factors(scale: float, cap: float) -> tuple[float, float]:
    """What products of queries and keys are multiplied with, and then what is bent, if at all.

    Args:
        cap: see `reference.capped`; 0 for none.
    """
    return (scale / cap, cap * LOG2_E) if cap else (scale * LOG2_E, 0.0)


@triton.jit
def weights_of(scores, highest, new_highest, total):  # type: ignore[no-untyped-def]
    """Adds a tile of scores to the softmax.

    Returns:
        The tile's weights under the new highest score, the factor of what was summed under the one
        before, and the sum of all weights.
    """
    weights = tl.exp2(scores - new_highest[:, None])
    rescale = tl.exp2(highest - new_highest)
    return weights, rescale, total * rescale + tl.sum(weights, 1)


@triton.jit
def end_of_part(highest, total):  # type: ignore[no-untyped-def]
    """The divisor of what a part summed, and the natural logarithm of that sum's weight.

    A part past the end of its context has lse -inf, so its weight in the merge is 0.
    """
    total = tl.where(total > 0, total, 1.0)
    return total, (highest + tl.log2(total)) * 0.6931471805599453
