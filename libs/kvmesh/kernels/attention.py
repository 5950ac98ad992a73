"""Triton attention over paged KV: split decode and varlen prefill.

Operands stay in the pool's dtype on a device; under the interpreter, whose bf16 arithmetic is
wrong, they are upcast to fp32. Accumulators are fp32, products of fp32 operands are three tf32 ones
(plain fp32 takes ptxas ten times as long). Positions find their block one by one, so any block size
works. Twins: attention_reference.py. Tests: tests/unit/kernels/test_triton_kernels.py, tests/gpu.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmesh.kernels.attention_parts import (
    end_of_part,
    part_of,
    score_factors,
    scores_of,
    slots_of,
    weights_of,
)
from kvmesh.kernels.attention_reference import merge_partials
from kvmesh.kernels.attention_sizes import DECODE_TILE, prompt_tile_of, tile_of
from kvmesh.kernels.device_limits import shared_memory_bytes

# Longer than any context.
_NO_WINDOW = 1 << 30
# Prompts follow the decode rows of a step, as many as there are: aligned or not, one kernel is
# compiled.
_ROW_POINTERS = ("tables_ptr", "starts_ptr", "lens_ptr")


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
    # Positions before the window are neither read nor seen.
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
    tl.store(out_ptr + row[:, None] * HEAD_DIM + dim[None, :], acc, mask=q_mask)
    tl.store(lse_ptr + row, lse, mask=group < GROUP)


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=_ROW_POINTERS)
def _prefill_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    q_ptr,
    kv_ptr,
    tables_ptr,
    starts_ptr,
    lens_ptr,
    out_ptr,
    sinks_ptr,
    scale,
    cap,
    stride_q_row,
    stride_q_head,
    stride_out_row,
    stride_out_head,
    stride_block,
    stride_value,
    stride_slot,
    stride_kv_head,
    stride_table,
    window,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    # One program: TILE queries of one head of one sequence.
    first_query = tl.program_id(0) * TILE
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    start_row = tl.load(starts_ptr + sequence)
    num_queries = tl.load(starts_ptr + sequence + 1) - start_row
    if first_query < num_queries:
        context_len = tl.load(lens_ptr + sequence)
        num_cached = context_len - num_queries
        tile = tl.arange(0, TILE)
        dim = tl.arange(0, DIM_TILE)
        query = first_query + tile
        q_mask = (query[:, None] < num_queries) & (dim[None, :] < HEAD_DIM)
        row = (start_row + query).to(tl.int64)
        q = tl.load(
            q_ptr + row[:, None] * stride_q_row + head * stride_q_head + dim[None, :],
            mask=q_mask,
            other=0.0,
        )
        if UPCAST:
            q = q.to(tl.float32)

        highest = tl.full((TILE,), float("-inf"), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        acc = tl.zeros((TILE, DIM_TILE), tl.float32)
        # Keys after the tile's last query are masked for all its rows.
        last = tl.minimum(num_cached + first_query + TILE, context_len)
        table_ptr = tables_ptr + sequence * stride_table
        # Those before the window of the tile's first query, too.
        seen = tl.maximum(num_cached + first_query + 1 - window, 0) // TILE * TILE
        for start in range(seen, last, TILE):
            position = start + tile
            valid = position < last
            slot = slots_of(table_ptr, position, valid, stride_block, stride_slot, BLOCK_SIZE)
            offsets = slot[:, None] + (head // GROUP) * stride_kv_head + dim[None, :]
            kv_mask = valid[:, None] & (dim[None, :] < HEAD_DIM)
            k = tl.load(kv_ptr + offsets, mask=kv_mask, other=0.0)
            v = tl.load(kv_ptr + stride_value + offsets, mask=kv_mask, other=0.0)
            if UPCAST:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            scores = scores_of(q, k, scale, cap, HAS_CAP)
            ahead = (num_cached + query)[:, None] - position[None, :]
            visible = valid[None, :] & (ahead >= 0) & (ahead < window)
            scores = tl.where(visible, scores, float("-inf"))
            # The bound keeps rows whose window starts in a later tile at zero, not at NaN.
            new_highest = tl.maximum(tl.maximum(highest, tl.max(scores, 1)), -1e30)
            weights, rescale, total = weights_of(scores, highest, new_highest, total)
            acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
            highest = new_highest

        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head) * 1.4426950408889634
            new_highest = tl.maximum(highest, sink)
            rescale = tl.exp2(highest - new_highest)
            total = total * rescale + tl.exp2(sink - new_highest)
            acc = acc * rescale[:, None]
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out_ptr + row[:, None] * stride_out_row + head * stride_out_head + dim[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=q_mask,
        )


def _constants(kv: Tensor, num_heads: int) -> dict[str, Any]:
    _, _, _, block_size, kv_heads, head_dim = kv.shape
    return {
        "BLOCK_SIZE": block_size,
        "GROUP": num_heads // kv_heads,
        "HEAD_DIM": head_dim,
        "DIM_TILE": max(16, triton.next_power_of_2(head_dim)),
        "TILE": tile_of(head_dim, kv.element_size()),
        # Only the interpreter runs on host tensors.
        "UPCAST": not kv.is_cuda,
    }


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
    """Attention of one query per sequence over its blocks.

    Args:
        q: [sequences, heads, head_dim], last axis contiguous.
        kv: [num_blocks, layers, 2, block_size, kv_heads, head_dim], contiguous, dtype of `q`.
        block_tables: [sequences, blocks] int32 or int64.
        context_lens: [sequences] int32 or int64, at least 1.
        max_context_len: at least the largest of them; 0 cuts every context by its own length,
            which a captured launch needs.
        num_splits: parts that a context is cut into, see `num_decode_splits`.
        scale: factor of the scores.
        window: latest positions that a query sees, its own among them; 0 for all.
        sinks: [heads] fp32, see `attention_reference.decode_attention`.
        cap: see `reference.capped`; 0 for none.

    Returns:
        [sequences, heads, head_dim], dtype of `q`.
    """
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
    )
    out = parts[:, :, 0] if num_splits == 1 else merge_partials(parts, lse)
    if sinks is not None:
        # The part of the softmax that the sink does not take.
        out = out * torch.sigmoid(lse.logsumexp(dim=-1) - sinks)[..., None]
    return out.to(q.dtype)


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
) -> tuple[Tensor, Tensor]:
    """Each part's attention [sequences, heads, splits, head_dim] and lse without the last axis."""
    num_sequences, num_heads, head_dim = q.shape
    pool = kv[:, layer]
    kv_heads = kv.shape[4]
    # Whole tiles, so that no part ends within one and the launch is specialised once.
    split_len = triton.cdiv(triton.cdiv(max_context_len, num_splits), DECODE_TILE) * DECODE_TILE
    parts = torch.empty(
        (num_sequences, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device
    )
    lse = torch.empty((num_sequences, num_heads, num_splits), dtype=torch.float32, device=q.device)
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
        window or _NO_WINDOW,
        **_constants(kv, num_heads),
        HAS_CAP=cap > 0,
        GROUP_TILE=max(16, triton.next_power_of_2(num_heads // kv_heads)),
        num_warps=4,
    )
    return parts, lse


def paged_prefill_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Causal attention of chunks over their cached prefixes and themselves, varlen.

    Args:
        q: [rows, heads, head_dim], last axis contiguous; KV of the rows is in `kv` already.
        kv: [num_blocks, layers, 2, block_size, kv_heads, head_dim], contiguous, dtype of `q`.
        block_tables: [sequences, blocks] int32.
        query_starts: [sequences + 1] int32, first row of each, then the number of rows.
        context_lens: [sequences] int32, cached positions and the chunk's own.
        max_query_len: at least the longest chunk.
        scale: factor of the scores.
        window: latest positions that a query sees, its own among them; 0 for all.
        sinks: [heads] fp32, see `attention_reference.decode_attention`.
        cap: see `reference.capped`; 0 for none.

    Returns:
        [rows, heads, head_dim], dtype of `q`.

    Source: FlashAttention-2, arXiv 2307.08691, over the blocks of arXiv 2309.06180.
    """
    num_heads = q.shape[1]
    pool = kv[:, layer]
    shared_bytes = shared_memory_bytes(kv.device) if kv.is_cuda else 0
    tile, num_warps = prompt_tile_of(q.shape[2], kv.element_size(), shared_bytes)
    constants = _constants(kv, num_heads) | {"TILE": tile}
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grid = (triton.cdiv(max_query_len, tile), num_heads, len(context_lens))
    _prefill_kernel[grid](
        q,
        pool,
        block_tables,
        query_starts,
        context_lens,
        out,
        out if sinks is None else sinks,
        *score_factors(scale, cap),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        pool.stride(3),
        block_tables.stride(0),
        window or _NO_WINDOW,
        **constants,
        HAS_CAP=cap > 0,
        HAS_SINKS=sinks is not None,
        num_warps=num_warps,
    )
    return out
