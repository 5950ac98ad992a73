"""The kernels of a step with inputs of a real model's size, their twins and what they move.

Shapes are those of an 8B Llama (32 heads, 8 KV heads of 128), MLA's of DeepSeek-V3, experts' of
Qwen3-30B-A3B, states' of Qwen3-Next and Granite 4 Small. Tests run the same cases small, in the
interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_case import BLOCK_SIZE, Compute, KernelCase, Sizes
from benchmarks.kernel_state_cases import state_case_makers
from kvmesh.engine import noise
from kvmesh.kernels import (
    attention,
    attention_merge,
    attention_reference,
    block_copy,
    block_ops,
    draw,
    expert_tiles,
    fused,
    grouped_gemm,
    latent,
    latent_attention,
    prompt_attention,
    reference,
)
from kvmesh.kernels.attention_sizes import num_decode_splits


def case_makers(
    sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> list[Callable[[], KernelCase]]:
    """What makes each case, with inputs from the seed of the device's generator.

    One by one, so that one that fails, or does not fit beside the others, is missing alone.
    """
    return [
        *(partial(_decode, sizes, *each, dtype, device) for each in sizes.decode),
        *(partial(_prefill, sizes, *each, dtype, device) for each in sizes.prefill),
        *(partial(_latent, sizes, *each, dtype, device) for each in sizes.decode),
        partial(_merge, sizes, dtype, device),
        partial(_rope_and_write, sizes, dtype, device),
        partial(_add_rms_norm, sizes, dtype, device),
        partial(_add_layer_norm, sizes, dtype, device),
        partial(_silu_and_mul, sizes, dtype, device),
        *(partial(_experts, sizes, rows, dtype, device) for rows in sizes.expert_rows),
        partial(_expert_tiles, sizes, device),
        *state_case_makers(sizes, device),
        partial(_draw, sizes, device),
        *(partial(_block_copy, sizes, dtype, device, scatters=each) for each in (False, True)),
    ]


def _pool(sizes: Sizes, count: int, context: int, like: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A pool of one layer with shuffled blocks, and the contexts' block tables."""
    blocks = -(-context // BLOCK_SIZE)
    shape = (count * blocks, 1, 2, BLOCK_SIZE, sizes.kv_heads, sizes.head_dim)
    kv = torch.randn(shape, **like)
    order = torch.randperm(count * blocks, generator=torch.Generator().manual_seed(0))
    return kv, order.view(count, blocks).to(like["device"], torch.int32)


def _decode_inputs(
    sizes: Sizes, count: int, context: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, dict[str, Any], attention_reference.DecodePlan]:
    like: dict[str, Any] = {"dtype": dtype, "device": device}
    kv, tables = _pool(sizes, count, context, like)
    q = torch.randn(count, sizes.heads, sizes.head_dim, **like)
    given = {
        "block_tables": tables,
        "context_lens": torch.full((count,), context, dtype=torch.int32, device=device),
        "max_context_len": context,
        "num_splits": num_decode_splits(count * sizes.kv_heads, context),
        "scale": sizes.head_dim**-0.5,
    }
    return q, kv, given, attention_reference.plan_decode(tables.tolist(), [context] * count, kv)


def _decode(
    sizes: Sizes, count: int, context: int, dtype: torch.dtype, device: torch.device
) -> KernelCase:
    q, kv, given, plan = _decode_inputs(sizes, count, context, dtype, device)
    return KernelCase(
        "paged decode",
        f"batch {count}, context {context}",
        lambda: attention.paged_decode_attention(q, kv, 0, **given),
        lambda: attention_reference.decode_attention(q, kv, 0, plan, given["scale"]),
        num_bytes=kv.nbytes + 2 * q.nbytes,
        flops=4 * count * context * sizes.heads * sizes.head_dim,
        tensors={"q": q, "kv": kv, "tables": given["block_tables"]},
    )


def _prefill(
    sizes: Sizes, count: int, cached: int, new: int, dtype: torch.dtype, device: torch.device
) -> KernelCase:
    like: dict[str, Any] = {"dtype": dtype, "device": device}
    context, scale = cached + new, sizes.head_dim**-0.5
    kv, tables = _pool(sizes, count, context, like)
    q = torch.randn(count * new, sizes.heads, sizes.head_dim, **like)
    starts = torch.arange(0, count * new + 1, new, dtype=torch.int32, device=device)
    lens = torch.full((count,), context, dtype=torch.int32, device=device)
    lists = tables.tolist()
    plans = [attention_reference.plan_prefill(table, context, new, kv) for table in lists]
    rows = [slice(index * new, (index + 1) * new) for index in range(count)]
    # With nothing cached the twin reads the chunk's own keys and values, not the pool.
    flat = kv[:, 0].transpose(0, 1).flatten(1, 2)
    slots = tables.long()[..., None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)
    own = slots.flatten(1)[:, cached:context]
    chunks = [(flat[0][each], flat[1][each]) for each in own]
    return KernelCase(
        "paged prefill",
        f"{count} chunks of {new}, {cached} cached",
        lambda: prompt_attention.paged_prefill_attention(
            q, kv, 0, tables, starts, lens, max_query_len=new, scale=scale
        ),
        lambda: torch.cat(
            [
                attention_reference.prefill_attention(q[part], k, v, kv, 0, plan, scale)
                for part, (k, v), plan in zip(rows, chunks, plans, strict=True)
            ]
        ),
        num_bytes=kv.nbytes + 2 * q.nbytes,
        flops=4 * count * new * (cached + (new + 1) // 2) * sizes.heads * sizes.head_dim,
        tensors={"q": q, "kv": kv, "tables": tables, "slots": slots.flatten(1)[:, :context]},
    )


def _latent(
    sizes: Sizes, count: int, context: int, dtype: torch.dtype, device: torch.device
) -> KernelCase:
    heads, rank, rope = sizes.latent
    like: dict[str, Any] = {"dtype": dtype, "device": device}
    blocks = -(-context // BLOCK_SIZE)
    kv = torch.randn(count * blocks, 1, BLOCK_SIZE, rank + rope, **like)
    order = torch.randperm(count * blocks, generator=torch.Generator().manual_seed(0))
    tables = order.view(count, blocks).to(device)
    lens = torch.full((count,), context, dtype=torch.int64, device=device)
    q = torch.randn(count, heads, rank + rope, **like)
    scale = (rank + rope) ** -0.5
    return KernelCase(
        "MLA decode",
        f"batch {count}, context {context}",
        lambda: latent_attention.latent_decode_attention(
            q, kv, 0, tables, lens, scale=scale, rank=rank
        ),
        lambda: latent.latent_decode_attention(q, kv, 0, tables, lens, scale=scale, rank=rank),
        num_bytes=kv.nbytes + 2 * q.nbytes,
        flops=2 * count * context * heads * (2 * rank + rope),
    )


def _merge(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> KernelCase:
    """Parts of attention as a decode step of few sequences leaves them."""
    count, splits = 4, 8
    lse = torch.randn(count, sizes.heads, splits, device=device)
    parts = torch.randn(*lse.shape, sizes.head_dim, device=device)
    return KernelCase(
        "merge of parts",
        f"batch {count}, {splits} parts",
        lambda: attention_merge.merged(parts, lse, dtype),
        lambda: attention_reference.merge_partials(parts, lse).to(dtype),
        num_bytes=parts.nbytes + lse.nbytes + parts[:, :, 0].numel() * dtype.itemsize,
    )


def _rope_and_write(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> KernelCase:
    like: dict[str, Any] = {"dtype": dtype, "device": device}
    rows = sizes.rows
    qkv = torch.randn(rows, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim, **like)
    kv, _ = _pool(sizes, 1, rows, like)
    angle = torch.rand(rows, 1, sizes.head_dim // 2, device=device)
    cos = torch.cat([angle.cos()] * 2, dim=-1).to(dtype)
    sin = torch.cat([-angle.sin(), angle.sin()], dim=-1).to(dtype)
    slots = torch.randperm(kv.shape[0] * BLOCK_SIZE, device=device)[:rows]

    def compute(operation: Callable[..., None]) -> Tensor:
        # In place: a copy, which both sides pay for, keeps the input what it was.
        turned = qkv.clone()
        operation(turned, None, 0.0, cos, sin, kv, 0, slots)
        return turned

    return KernelCase(
        "rope and KV write",
        f"{rows} rows",
        lambda: compute(fused.rope_and_write),
        lambda: compute(reference.rope_and_write),
        num_bytes=4 * qkv.nbytes + 2 * rows * sizes.kv_heads * sizes.head_dim * dtype.itemsize,
    )


def _add_rms_norm(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> KernelCase:
    like: dict[str, Any] = {"dtype": dtype, "device": device}
    x, delta = (torch.randn(sizes.rows, sizes.hidden, **like) for _ in range(2))
    weight = torch.randn(sizes.hidden, **like)
    return KernelCase(
        "add and RMSNorm",
        f"{sizes.rows} x {sizes.hidden}",
        lambda: fused.add_rms_norm(x.clone(), delta, weight, 1e-5),
        lambda: reference.add_rms_norm(x.clone(), delta, weight, 1e-5),
        num_bytes=6 * x.nbytes,
    )


def _add_layer_norm(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> KernelCase:
    like: dict[str, Any] = {"dtype": dtype, "device": device}
    x, delta = (torch.randn(sizes.rows, sizes.hidden, **like) for _ in range(2))
    weight, bias = (torch.randn(sizes.hidden, **like) for _ in range(2))
    return KernelCase(
        "add and LayerNorm",
        f"{sizes.rows} x {sizes.hidden}",
        lambda: fused.add_layer_norm(x.clone(), delta, weight, bias, 1e-5),
        lambda: reference.add_layer_norm(x.clone(), delta, weight, bias, 1e-5),
        num_bytes=6 * x.nbytes,
    )


def _silu_and_mul(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> KernelCase:
    x = torch.randn(sizes.rows, 2 * sizes.activation, dtype=dtype, device=device)
    return KernelCase(
        "gated activation",
        f"{sizes.rows} x {sizes.activation}",
        lambda: fused.silu_and_mul(x),
        lambda: reference.silu_and_mul(x),
        num_bytes=x.nbytes * 3 // 2,
    )


def _experts(sizes: Sizes, rows: int, dtype: torch.dtype, device: torch.device) -> KernelCase:
    experts, top_k, depth, columns = sizes.experts
    like: dict[str, Any] = {"dtype": dtype, "device": device}
    x = torch.randn(rows, depth, **like)
    weights = torch.randn(experts, columns, depth, **like)
    chosen = torch.rand(rows, experts, device=device).topk(top_k, dim=-1).indices
    shape = expert_tiles.shape_for(chosen, experts)
    tiles = expert_tiles.plan_many(chosen.flatten(), experts, shape)
    places, ordered = tiles.order // top_k, chosen.flatten()[tiles.order]
    used = len(torch.unique(chosen))
    return KernelCase(
        "grouped GEMM",
        f"{rows} rows, {top_k} of {experts} experts",
        lambda: grouped_gemm.grouped_gemm(x, weights, tiles, top_k=top_k),
        lambda: grouped_gemm.grouped_product(x, weights, places, ordered),
        num_bytes=used * weights[0].nbytes + x.nbytes + rows * top_k * columns * dtype.itemsize,
        flops=2 * rows * top_k * depth * columns,
    )


def _expert_tiles(sizes: Sizes, device: torch.device) -> KernelCase:
    experts, top_k, _, _ = sizes.experts
    rows = sizes.expert_rows[0]
    flat = torch.rand(rows, experts, device=device).topk(top_k, dim=-1).indices.flatten()
    shape = expert_tiles.shape_for(flat, experts)
    return KernelCase(
        "sorting of choices",
        f"{rows} rows, {top_k} of {experts} experts",
        lambda: expert_tiles.plan_few(flat, experts, shape).order,
        lambda: expert_tiles.plan_many(flat, experts, shape).order,
        num_bytes=2 * flat.nbytes,
    )


def _draw(sizes: Sizes, device: torch.device) -> KernelCase:
    rows = min(32, sizes.rows)
    logits = torch.randn(rows, sizes.vocab, device=device)
    keys = [noise.stream_key(1, row) for row in range(rows)]
    halves = torch.tensor([[key & 0xFFFFFFFF for key in keys], [key >> 32 for key in keys]])
    low, high = halves.to(torch.int32).to(device)
    ones = torch.ones(rows, dtype=torch.int32, device=device)
    return KernelCase(
        "sampling",
        f"{rows} x {sizes.vocab}",
        lambda: draw.draw(logits, low, high, ones),
        lambda: (logits + noise.gumbel_noise(keys, sizes.vocab, device)).argmax(dim=-1),
        num_bytes=logits.nbytes,
    )


def _block_copy(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, *, scatters: bool
) -> KernelCase:
    """Every other block of a pool of whole blocks (all layers), out of order, and a buffer."""
    count = max(2, sizes.rows // BLOCK_SIZE)
    block = sizes.layers * 2 * BLOCK_SIZE * sizes.kv_heads * sizes.head_dim * dtype.itemsize
    like: dict[str, Any] = {"dtype": torch.uint8, "device": device}
    pool, buffer = (torch.randint(256, (each * block,), **like) for each in (2 * count, count))
    there = 2 * block * torch.randperm(count, generator=torch.Generator().manual_seed(0))
    here = block * torch.arange(count)
    target, source, places = buffer, pool, torch.stack([here, there], dim=1)
    if scatters:
        target, source, places = pool, buffer, places.flip(1)

    def case_of(copy: Callable[[Tensor, Tensor, Tensor, int], None]) -> Compute:
        own = target.clone()  # so that a comparison sees what this side has written

        def compute() -> Tensor:
            copy(own, source, places, block)
            return own

        return compute

    return KernelCase(
        "block scatter" if scatters else "block gather",
        f"{count} blocks of {block >> 10} KiB",
        case_of(block_copy.copy_pieces),
        case_of(block_ops.copy_one_by_one),
        num_bytes=2 * buffer.nbytes,
        can_be_captured=False,
    )
