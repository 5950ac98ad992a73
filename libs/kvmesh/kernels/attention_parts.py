"""Functions that the Triton attention kernels share: addresses of positions, and online softmax.

Scores are multiplied by log2(e). Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def part_of(lens_ptr, sequence, split, num_splits, split_len, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the context's length, and the begin and nominal end of this part of it."""
    context_len = tl.load(lens_ptr + sequence).to(tl.int32)
    # Without a given length, every context is split by its own length.
    own_len = tl.cdiv(tl.cdiv(context_len, num_splits), TILE) * TILE
    split_len = tl.where(split_len > 0, split_len, own_len)
    first = split * split_len
    return context_len, first, first + split_len


@triton.jit
def slots_of(  # type: ignore[no-untyped-def]
    table_ptr, position, valid, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr
):
    """Returns the pool offsets of a sequence's positions, by its block table."""
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=valid, other=0)
    # int64: block stride times block id exceeds 2^31 in a large pool.
    return block.to(tl.int64) * stride_block + (position % BLOCK_SIZE) * stride_slot


@triton.jit
def scores_of(q, k, scale, cap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the scores of a tile, with the factors of `score_factors`."""
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
    if HAS_CAP:
        # tanh(x) is 2 * sigmoid(2 * x) - 1.
        scores = (2.0 * tl.sigmoid(2.0 * scores) - 1.0) * cap
    return scores


def score_factors(scale: float, cap: float) -> tuple[float, float]:
    """Returns the factor of q·k products, and the factor after soft-capping's tanh.

    Args:
        cap: bound of soft-capping, see `reference.capped`; 0 for none.
    """
    return (scale / cap, cap * LOG2_E) if cap else (scale * LOG2_E, 0.0)


@triton.jit
def weights_of(scores, highest, new_highest, total):  # type: ignore[no-untyped-def]
    """Adds a tile of scores to the online softmax.

    Returns:
        The tile's weights relative to the new highest score, the factor that rescales earlier
        sums to it, and the sum of all weights.
    """
    weights = tl.exp2(scores - new_highest[:, None])
    rescale = tl.exp2(highest - new_highest)
    return weights, rescale, total * rescale + tl.sum(weights, 1)


@triton.jit
def end_of_part(highest, total):  # type: ignore[no-untyped-def]
    """Returns the divisor of a part's sum, and the part's log-sum-exp in natural units.

    A part past the end of its context has lse -inf, so its weight in the merge is 0.
    """
    total = tl.where(total > 0, total, 1.0)
    return total, (highest + tl.log2(total)) * 0.6931471805599453
