"""Triton attention of prompts over paged KV, varlen; attention.py describes both kernels' numerics.

Positions that every query of a tile sees are computed without a mask, which would cost as much as
their softmax; positions at the edges are masked. Twin: attention_reference.py. Tests:
tests/unit/kernels/test_triton_kernels.py, tests/gpu.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmesh.kernels.attention_parts import LOG2_E, slots_of, weights_of
from kvmesh.kernels.attention_sizes import NO_WINDOW, prompt_tiles_of, stages_of
from kvmesh.kernels.device_limits import MOST_SHARED_BYTES, shared_memory_bytes

# Prompts follow the decode rows of a step: not specialised by alignment, so that one kernel is
# compiled.
_ROW_POINTERS = ("tables_ptr", "starts_ptr", "lens_ptr")


@triton.jit
def _add_tile(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - part of a kernel
    highest,
    total,
    acc,
    q,
    at,
    start,
    last,
    kv_ptr,
    table_ptr,
    scale,
    factor,
    stride_block,
    stride_value,
    stride_slot,
    window,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
    HAS_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    # Adds TILE positions to the softmax of queries at positions `at`.
    position = start + tl.arange(0, TILE)
    dim = tl.arange(0, DIM_TILE)
    valid = position < last
    slot = slots_of(table_ptr, position, valid, stride_block, stride_slot, BLOCK_SIZE)
    keys = kv_ptr + slot[:, None] + dim[None, :]
    if MASKED:
        mask = valid[:, None] & (dim[None, :] < HEAD_DIM)
        k = tl.load(keys, mask=mask, other=0.0)
        v = tl.load(keys + stride_value, mask=mask, other=0.0)
    elif HEAD_DIM == DIM_TILE:
        k = tl.load(keys)
        v = tl.load(keys + stride_value)
    else:
        k = tl.load(keys, mask=dim[None, :] < HEAD_DIM, other=0.0)
        v = tl.load(keys + stride_value, mask=dim[None, :] < HEAD_DIM, other=0.0)
    if UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    if HAS_CAP:
        # tanh(x) is 2 * sigmoid(2 * x) - 1.
        scores = 2.0 * tl.sigmoid(2.0 * scores * scale) - 1.0
    if MASKED:
        ahead = at[:, None] - position[None, :]
        scores = tl.where((ahead >= 0) & (ahead < window), scores, float("-inf"))
    # The factor comes last: it fuses with the subtraction of the maximum into one operation.
    new_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
    if MASKED:
        # Rows whose window starts in a later tile stay at zero instead of NaN.
        new_highest = tl.maximum(new_highest, -1e30)
    weights, rescale, total = weights_of(scores * factor, highest, new_highest, total)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="tf32x3")
    return new_highest, total, acc


@triton.jit
def _bounds(  # type: ignore[no-untyped-def]
    first_at,
    context_len,
    window,
    QUERY_TILE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WHOLE: tl.constexpr,
):
    # At least one query of a tile sees [seen, last), and all queries see [whole, whole_end).
    last = tl.minimum(first_at + QUERY_TILE, context_len)
    seen = tl.maximum(first_at + 1 - window, 0) // TILE * TILE
    whole_end = (first_at + 1) // TILE * TILE if HAS_WHOLE else seen
    whole = tl.cdiv(tl.maximum(first_at + QUERY_TILE - window, 0), TILE) * TILE
    return seen, tl.minimum(whole, whole_end), whole_end, last


@triton.jit
def _add_sink(highest, total, acc, sink):  # type: ignore[no-untyped-def]
    # The sink is a score without a position, in natural units, that takes a share of the softmax.
    sink = sink * 1.4426950408889634
    new_highest = tl.maximum(highest, sink)
    rescale = tl.exp2(highest - new_highest)
    return total * rescale + tl.exp2(sink - new_highest), acc * rescale[:, None]


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
    factor,
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
    QUERY_TILE: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_WHOLE: tl.constexpr,
):
    # One program: QUERY_TILE queries of one head of one sequence; the longest contexts start first.
    head = tl.program_id(0)
    first_query = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERY_TILE
    sequence = tl.program_id(2)
    start_row = tl.load(starts_ptr + sequence)
    num_queries = tl.load(starts_ptr + sequence + 1) - start_row
    if first_query < num_queries:
        context_len = tl.load(lens_ptr + sequence)
        dim = tl.arange(0, DIM_TILE)
        query = first_query + tl.arange(0, QUERY_TILE)
        at = context_len - num_queries + query
        q_mask = (query[:, None] < num_queries) & (dim[None, :] < HEAD_DIM)
        row = (start_row + query).to(tl.int64)
        q = tl.load(
            q_ptr + row[:, None] * stride_q_row + head * stride_q_head + dim[None, :],
            mask=q_mask,
            other=0.0,
        )
        q = q.to(tl.float32) if UPCAST else q
        highest = tl.full((QUERY_TILE,), float("-inf"), tl.float32)
        total = tl.zeros((QUERY_TILE,), tl.float32)
        acc = tl.zeros((QUERY_TILE, DIM_TILE), tl.float32)
        table_ptr = tables_ptr + sequence * stride_table
        first_at = context_len - num_queries + first_query
        seen, whole, whole_end, last = _bounds(
            first_at, context_len, window, QUERY_TILE, TILE, HAS_WHOLE
        )
        if HAS_WHOLE:
            for start in range(whole, whole_end, TILE):
                highest, total, acc = _add_tile(
                    highest,
                    total,
                    acc,
                    q,
                    at,
                    start,
                    last,
                    kv_ptr + head // GROUP * stride_kv_head,
                    table_ptr,
                    scale,
                    factor,
                    stride_block,
                    stride_value,
                    stride_slot,
                    window,
                    BLOCK_SIZE,
                    HEAD_DIM,
                    DIM_TILE,
                    TILE,
                    UPCAST,
                    HAS_CAP,
                    False,
                )
        num_before = (whole - seen) // TILE
        for index in range(num_before + tl.cdiv(last - whole_end, TILE)):
            begin = tl.where(index < num_before, seen, whole_end - num_before * TILE)
            highest, total, acc = _add_tile(
                highest,
                total,
                acc,
                q,
                at,
                begin + index * TILE,
                last,
                kv_ptr + head // GROUP * stride_kv_head,
                table_ptr,
                scale,
                factor,
                stride_block,
                stride_value,
                stride_slot,
                window,
                BLOCK_SIZE,
                HEAD_DIM,
                DIM_TILE,
                TILE,
                UPCAST,
                HAS_CAP,
                True,
            )

        if HAS_SINKS:
            total, acc = _add_sink(highest, total, acc, tl.load(sinks_ptr + head))
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out_ptr + row[:, None] * stride_out_row + head * stride_out_head + dim[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=q_mask,
        )


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
    """Computes causal attention of chunks over their cached prefixes and themselves, varlen.

    Args:
        q: [rows, heads, head_dim], last axis contiguous; KV of the rows is in `kv` already.
        kv: [num_blocks, layers, 2, block_size, kv_heads, head_dim], contiguous, dtype of `q`.
        block_tables: [sequences, blocks] int32.
        query_starts: [sequences + 1] int32, first row of each, then the number of rows.
        context_lens: [sequences] int32, cached positions and the chunk's own.
        max_query_len: at least the longest chunk.
        scale: factor of the scores, above 0.
        window: number of latest positions that a query sees, its own included; 0 for all.
        sinks: [heads] fp32, see `attention_reference.decode_attention`.
        cap: bound of soft-capping, see `reference.capped`; 0 for none.

    Returns:
        [rows, heads, head_dim], dtype of `q`.

    Source: FlashAttention-2, arXiv 2307.08691, over the blocks of arXiv 2309.06180.
    """
    num_heads, head_dim = q.shape[1:]
    pool = kv[:, layer]
    _, _, block_size, kv_heads, _ = pool.shape
    # Host tensors occur only under the interpreter.
    shared_bytes = shared_memory_bytes(kv.device) if kv.is_cuda else MOST_SHARED_BYTES
    tiles = prompt_tiles_of(head_dim, kv.element_size(), shared_bytes, max_query_len)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grid = (num_heads, triton.cdiv(max_query_len, tiles.queries), len(context_lens))
    _prefill_kernel[grid](
        q,
        pool,
        block_tables,
        query_starts,
        context_lens,
        out,
        out if sinks is None else sinks,
        scale / cap if cap else scale,
        (cap or scale) * LOG2_E,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        pool.stride(3),
        block_tables.stride(0),
        window or NO_WINDOW,
        BLOCK_SIZE=block_size,
        GROUP=num_heads // kv_heads,
        HEAD_DIM=head_dim,
        DIM_TILE=max(16, triton.next_power_of_2(head_dim)),
        QUERY_TILE=tiles.queries,
        TILE=tiles.positions,
        UPCAST=not kv.is_cuda,
        HAS_CAP=cap > 0,
        HAS_SINKS=sinks is not None,
        # ptxas takes so long for fp32 products that they are compiled only once.
        HAS_WHOLE=kv.element_size() < torch.float32.itemsize or not kv.is_cuda,
        num_warps=tiles.warps,
        num_stages=stages_of(head_dim, kv.element_size(), shared_bytes),
    )
    return out
