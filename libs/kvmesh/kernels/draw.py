"""Triton sampling from logits: noise and argmax in one pass, so noise is never in memory.

Twin: `engine/noise.py`, which computes the same integers. Tests:
tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
# Number of programs that fill a large device; rows are split to reach it.
_TARGET_PROGRAMS = 264
# Rows of one table: not specialised by alignment, so that one kernel is compiled.
_ROW_POINTERS = ("low_ptr", "high_ptr", "random_ptr")


@triton.jit
def _scramble(x):  # type: ignore[no-untyped-def]
    # Constants and shifts of `noise._scramble`.
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit(do_not_specialize_on_alignment=_ROW_POINTERS)
def _draw_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    logits_ptr,
    low_ptr,
    high_ptr,
    random_ptr,
    best_ptr,
    index_ptr,
    vocab_size,
    stride_row,
    split_len,
    TILE: tl.constexpr,
):
    # One program: one row, one part of the vocabulary.
    row = tl.program_id(0)
    split = tl.program_id(1)
    low = tl.load(low_ptr + row).to(tl.uint32, bitcast=True)
    high = tl.load(high_ptr + row).to(tl.uint32, bitcast=True)
    is_random = tl.load(random_ptr + row) != 0
    lane = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    # A row whose logits are all -inf or NaN still gives a token, since other rows continue.
    index = tl.zeros((TILE,), tl.int32)
    first = split * split_len
    last = tl.minimum(first + split_len, vocab_size)
    for start in range(first, last, TILE):
        token = start + lane
        valid = token < last
        value = tl.load(
            logits_ptr + row.to(tl.int64) * stride_row + token, mask=valid, other=float("-inf")
        )
        x = token.to(tl.uint32, bitcast=True) * 0x9E3779B1 + low
        x = _scramble(_scramble(x) ^ high) >> 1
        # 2^-31, and the largest fp32 under 1.
        uniform = (x.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * 4.656612873077393e-10
        uniform = tl.minimum(uniform, 0.999999940395355)
        # -log1p(-uniform) by Kahan's method, exact where 1 - uniform is rounded.
        rest = 1.0 - uniform
        ratio = tl.where(rest == 1.0, 1.0, tl.log(rest) / tl.where(rest == 1.0, 1.0, rest - 1.0))
        noise = -tl.log(uniform * ratio)
        value = tl.where(is_random, value + noise, value)
        better = valid & (value > best)
        best = tl.where(better, value, best)
        index = tl.where(better, token, index)
    highest = tl.max(best, 0)
    # Among equal values the lowest token wins, whatever lane it was in.
    lowest = tl.min(tl.where(best == highest, index, 0x7FFFFFFF), 0)
    part = row * tl.num_programs(1) + split
    tl.store(best_ptr + part, highest)
    tl.store(index_ptr + part, lowest)


def draw(logits: Tensor, low: Tensor, high: Tensor, is_random: Tensor) -> Tensor:
    """Returns the index of each row's highest logit, with Gumbel noise in random rows.

    Args:
        logits: [rows, vocab] fp32, last axis contiguous.
        low, high: [rows] int32, the halves of `noise.stream_key`.
        is_random: [rows] int32, 0 for plain argmax.

    Returns:
        [rows] int64 token ids; the lowest of equal ones, 0 if none is above -inf.
    """
    rows, vocab_size = logits.shape
    splits = max(1, min(triton.cdiv(_TARGET_PROGRAMS, rows), triton.cdiv(vocab_size, _TILE)))
    split_len = triton.cdiv(triton.cdiv(vocab_size, splits), _TILE) * _TILE
    splits = triton.cdiv(vocab_size, split_len)
    best = torch.empty((rows, splits), dtype=torch.float32, device=logits.device)
    index = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    _draw_kernel[(rows, splits)](
        logits,
        low,
        high,
        is_random,
        best,
        index,
        vocab_size,
        logits.stride(0),
        split_len,
        TILE=_TILE,
        num_warps=8,
    )
    equal = best == best.amax(dim=1, keepdim=True)
    return torch.where(equal, index, vocab_size).amin(dim=1).long()
