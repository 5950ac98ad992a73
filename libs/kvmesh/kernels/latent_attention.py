"""Triton decode attention over latents (MLA): all heads of a sequence load each vector once.

Twin: `latent.latent_decode_attention`. Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmesh.kernels.attention_merge import merged
from kvmesh.kernels.attention_parts import LOG2_E, end_of_part, part_of, slots_of, weights_of
from kvmesh.kernels.attention_sizes import num_decode_splits

_TILE = 32
_HEAD_TILE = 16


@triton.jit(do_not_specialize=["stride_table"])
def _latent_decode_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a device signature
    q_ptr,
    kv_ptr,
    tables_ptr,
    lens_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_slot,
    stride_table,
    split_len,
    num_heads,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # One program: one sequence, HEAD_TILE heads, one part of the context.
    sequence = tl.program_id(0)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    rank = tl.arange(0, RANK_TILE)
    rope = tl.arange(0, ROPE_TILE)
    tile = tl.arange(0, TILE)
    row = q_ptr + sequence * stride_q_row + head[:, None] * stride_q_head
    is_head = head[:, None] < num_heads
    q_latent = tl.load(row + rank[None, :], mask=is_head & (rank[None, :] < RANK), other=0.0)
    q_rope = tl.load(row + RANK + rope[None, :], mask=is_head & (rope[None, :] < ROPE), other=0.0)
    if UPCAST:
        q_latent = q_latent.to(tl.float32)
        q_rope = q_rope.to(tl.float32)

    context_len, first, end = part_of(lens_ptr, sequence, split, num_splits, split_len, TILE)
    last = tl.minimum(end, context_len)
    table_ptr = tables_ptr + sequence * stride_table
    highest = tl.full((HEAD_TILE,), float("-inf"), tl.float32)
    total = tl.zeros((HEAD_TILE,), tl.float32)
    acc = tl.zeros((HEAD_TILE, RANK_TILE), tl.float32)
    for start in range(first, last, TILE):
        position = start + tile
        valid = position < last
        slot = slots_of(table_ptr, position, valid, stride_block, stride_slot, BLOCK_SIZE)
        vector = kv_ptr + slot[:, None]
        latent = tl.load(
            vector + rank[None, :], mask=valid[:, None] & (rank[None, :] < RANK), other=0.0
        )
        key = tl.load(
            vector + RANK + rope[None, :], mask=valid[:, None] & (rope[None, :] < ROPE), other=0.0
        )
        if UPCAST:
            latent = latent.to(tl.float32)
            key = key.to(tl.float32)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="tf32x3")
        scores += tl.dot(q_rope, tl.trans(key), input_precision="tf32x3")
        scores = tl.where(valid[None, :], scores * scale_log2, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights, rescale, total = weights_of(scores, highest, new_highest, total)
        mixed = tl.dot(weights.to(latent.dtype), latent, input_precision="tf32x3")
        acc = acc * rescale[:, None] + mixed
        highest = new_highest

    total, lse = end_of_part(highest, total)
    part = (sequence * num_heads + head) * num_splits + split
    out = out_ptr + part[:, None] * RANK + rank[None, :]
    mixed = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out, mixed, mask=is_head & (rank[None, :] < RANK))
    tl.store(lse_ptr + part, lse, mask=head < num_heads)


def latent_decode_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    tables: Tensor,
    lens: Tensor,
    *,
    scale: float,
    rank: int,
    num_splits: int = 0,
    by_length: bool = False,
) -> Tensor:
    """See `latent.latent_decode_attention`; `q` is contiguous in its last axis.

    Args:
        num_splits: number of parts of a context; 0 to fill the device.
        by_length: split every context by its own length, not by that of the tables.
    """
    sequences, heads, width = q.shape
    pool = kv[:, layer]
    head_tiles = triton.cdiv(heads, _HEAD_TILE)
    span = tables.shape[1] * kv.shape[2]
    num_splits = num_splits or num_decode_splits(sequences * head_tiles, span, _TILE)
    split_len = 0 if by_length else triton.cdiv(triton.cdiv(span, num_splits), _TILE) * _TILE
    lse = torch.empty((sequences, heads, num_splits), dtype=torch.float32, device=q.device)
    dtype = q.dtype if num_splits == 1 else lse.dtype
    parts = torch.empty((*lse.shape, rank), dtype=dtype, device=q.device)
    _latent_decode_kernel[(sequences, head_tiles, num_splits)](
        q,
        pool,
        tables,
        lens,
        parts,
        lse,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        pool.stride(0),
        pool.stride(1),
        tables.stride(0),
        split_len,
        heads,
        BLOCK_SIZE=kv.shape[2],
        RANK=rank,
        RANK_TILE=max(16, triton.next_power_of_2(rank)),
        ROPE=width - rank,
        ROPE_TILE=max(16, triton.next_power_of_2(width - rank)),
        HEAD_TILE=_HEAD_TILE,
        TILE=_TILE,
        # Host tensors occur only under the interpreter.
        UPCAST=not kv.is_cuda,
        num_warps=8,
    )
    return parts[:, :, 0] if num_splits == 1 else merged(parts, lse, q.dtype)
