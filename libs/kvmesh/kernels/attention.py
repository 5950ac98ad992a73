"""Triton attention of decode rows over paged KV, with contexts split into parts.
prompt_attention.py has prompts.

On a device operands stay in the pool's dtype. Under the interpreter, whose bf16 arithmetic is
wrong, they are upcast to fp32. Accumulators are fp32. Products of fp32 operands are three tf32
products (plain fp32 takes ptxas ten times as long). Each position finds its own block, so any block
size works. Twins: attention_reference.py. Tests: tests/unit/kernels/test_triton_kernels.py,
tests/gpu.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmesh.kernels.attention_merge import merged
from kvmesh.kernels.attention_parts import (
    end_of_part,
    part_of,
    score_factors,
    scores_of,
    slots_of,
    weights_of,
)
from kvmesh.kernels.attention_sizes import DECODE_TILE, NO_WINDOW, stages_of, tile_of
from kvmesh.kernels.device_limits import shared_memory_bytes


@triton.jit(do_not_specialize=["stride_table"])
def _decode_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    q_ptr,
    kv_ptr,
    tables_ptr,
    lens_ptr,
    out_ptr,
    lse_ptr,
    scale,
    cap,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_value,
    stride_slot,
    stride_kv_head,
    stride_table,
    split_len,
    window,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    # One program: one sequence, one KV head with its GROUP query heads, one part of the context.
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    num_splits = tl.num_programs(2)

    group = tl.arange(0, GROUP_TILE)
    dim = tl.arange(0, DIM_TILE)
    tile = tl.arange(0, TILE)
    head = kv_head * GROUP + group
    q_mask = (group[:, None] < GROUP) & (dim[None, :] < HEAD_DIM)
    q_offsets = sequence * stride_q_row + head[:, None] * stride_q_head + dim[None, :]
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    context_len, start_of_part, end = part_of(
        lens_ptr, sequence, split, num_splits, split_len, TILE
    )
    # Positions before the window are neither loaded nor visible.
    seen = tl.maximum(context_len - window, 0)
    first = tl.maximum(start_of_part, seen // TILE * TILE)
    last = tl.minimum(end, context_len)
    table_ptr = tables_ptr + sequence * stride_table
    highest = tl.full((GROUP_TILE,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_TILE,), tl.float32)
    acc = tl.zeros((GROUP_TILE, DIM_TILE), tl.float32)
    for start in range(first, last, TILE):
        position = start + tile
        valid = (position < last) & (position >= seen)
        slot = slots_of(table_ptr, position, valid, stride_block, stride_slot, BLOCK_SIZE)
        offsets = slot[:, None] + kv_head * stride_kv_head + dim[None, :]
        kv_mask = valid[:, None] & (dim[None, :] < HEAD_DIM)
        k = tl.load(kv_ptr + offsets, mask=kv_mask, other=0.0)
        v = tl.load(kv_ptr + stride_value + offsets, mask=kv_mask, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = scores_of(q, k, scale, cap, HAS_CAP)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights, rescale, total = weights_of(scores, highest, new_highest, total)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
        highest = new_highest

    total, lse = end_of_part(highest, total)
    acc = acc / total[:, None]
    num_heads = num_kv_heads * GROUP
    row = (sequence * num_heads + head) * num_splits + split
    tl.store(
        out_ptr + row[:, None] * HEAD_DIM + dim[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=q_mask,
    )
    tl.store(lse_ptr + row, lse, mask=group < GROUP)


def paged_decode_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    max_context_len: int,
    num_splits: int,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Computes attention of one query per sequence over its blocks.

    Args:
        q: [sequences, heads, head_dim], last axis contiguous.
        kv: [num_blocks, layers, 2, block_size, kv_heads, head_dim], contiguous, dtype of `q`.
        block_tables: [sequences, blocks] int32 or int64.
        context_lens: [sequences] int32 or int64, at least 1.
        max_context_len: at least the largest of them. 0 splits every context by its own length,
            which a captured launch needs.
        num_splits: number of parts of a context, see `num_decode_splits`.
        scale: factor of the scores.
        window: number of latest positions that a query sees, its own included; 0 for all.
        sinks: [heads] fp32, see `attention_reference.decode_attention`.
        cap: bound of soft-capping, see `reference.capped`; 0 for none.

    Returns:
        [sequences, heads, head_dim], dtype of `q`.
    """
    is_whole = num_splits == 1 and sinks is None
    parts, lse = _decode_parts(
        q,
        kv,
        layer,
        block_tables,
        context_lens,
        max_context_len=max_context_len,
        num_splits=num_splits,
        scale=scale,
        window=window,
        cap=cap,
        is_whole=is_whole,
    )
    if is_whole:
        return parts[:, :, 0]
    return merged(parts, lse, q.dtype, sinks)


def _decode_parts(
    q: Tensor,
    kv: Tensor,
    layer: int,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    max_context_len: int,
    num_splits: int,
    scale: float,
    window: int,
    cap: float,
    is_whole: bool,
) -> tuple[Tensor, Tensor]:
    """Computes each part's attention [sequences, heads, splits, head_dim], and its lse.

    The lse has the same shape without the last axis.

    Args:
        is_whole: whether there is only one part, whose attention is the result.
    """
    num_sequences, num_heads, head_dim = q.shape
    pool = kv[:, layer]
    kv_heads = kv.shape[4]
    shared_bytes = shared_memory_bytes(kv.device) if kv.is_cuda else 0
    # Whole tiles, so that no part ends within a tile and the launch is specialised once.
    split_len = triton.cdiv(triton.cdiv(max_context_len, num_splits), DECODE_TILE) * DECODE_TILE
    lse = torch.empty((num_sequences, num_heads, num_splits), dtype=torch.float32, device=q.device)
    dtype = q.dtype if is_whole else lse.dtype
    parts = torch.empty((*lse.shape, head_dim), dtype=dtype, device=q.device)
    _decode_kernel[(num_sequences, kv_heads, num_splits)](
        q,
        pool,
        block_tables,
        context_lens,
        parts,
        lse,
        *score_factors(scale, cap),
        q.stride(0),
        q.stride(1),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        pool.stride(3),
        block_tables.stride(0),
        split_len,
        window or NO_WINDOW,
        BLOCK_SIZE=kv.shape[3],
        GROUP=num_heads // kv_heads,
        GROUP_TILE=max(16, triton.next_power_of_2(num_heads // kv_heads)),
        HEAD_DIM=head_dim,
        DIM_TILE=max(16, triton.next_power_of_2(head_dim)),
        TILE=tile_of(head_dim, kv.element_size()),
        # Host tensors occur only under the interpreter.
        UPCAST=not kv.is_cuda,
        HAS_CAP=cap > 0,
        num_warps=4,
        num_stages=stages_of(head_dim, kv.element_size(), shared_bytes),
    )
    return parts, lse
