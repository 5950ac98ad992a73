"""The kernels of a step with inputs of a real model's size, their twins and what they move.

Shapes are those of an 8B Llama (32 heads, 8 KV heads of 128), MLA's of DeepSeek-V3, experts' of
Qwen3-30B-A3B, states' of Qwen3-Next. Tests run the same cases small, in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvmesh.engine import noise
from kvmesh.kernels import (
    attention,
    attention_reference,
    block_copy,
    block_ops,
    delta_rule,
    draw,
    fused,
    grouped_gemm,
    latent,
    latent_attention,
    lightning,
    lightning_reference,
    linear_reference,
    reference,
)
from kvmesh.kernels.attention_sizes import num_decode_splits

BLOCK_SIZE = 16
Compute = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the cases are; `SMALL` has every case within the interpreter's reach.

    Attributes:
        decode: (sequences, positions of each context).
        prefill: (chunks, cached positions of each, positions of each chunk).
        rows: rows of the steps between the matrix products.
        positions: positions of a prompt for the delta rule.
    """

    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int, int], ...]
    rows: int
    positions: int
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    activation: int = 14_336
    vocab: int = 128_256
    experts: tuple[int, int, int, int] = (128, 8, 2048, 768)
    latent: tuple[int, int, int] = (128, 512, 64)
    state: tuple[int, int] = (32, 128)


LARGE = Sizes(
    decode=((1, 32_768), (32, 8192), (128, 2048)),
    prefill=((1, 0, 4096), (8, 0, 1024), (1, 7168, 1024)),
    rows=4096,
    positions=4096,
)
SMALL = Sizes(
    decode=((2, 80),),
    prefill=((2, 0, 9), (1, 20, 5)),
    rows=3,
    positions=20,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    hidden=48,
    activation=64,
    vocab=300,
    experts=(4, 2, 32, 24),
    latent=(3, 24, 8),
    state=(2, 16),
)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel on one set of inputs.

    Attributes:
        shape: for the table.
        ours, twin: the same result, up to rounding.
        num_bytes: that have to be read and written at least.
        flops: multiplications and additions, 0 where memory alone counts.
        tensors: inputs of rivals, by name.
        can_be_captured: nothing in it comes from the host.
    """

    name: str
    shape: str
    ours: Compute
    twin: Compute
    num_bytes: int
    flops: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    can_be_captured: bool = True


def kernel_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> list[KernelCase]:
    """All cases; inputs come from the seed of the device's generator."""
    return [
        *(_decode(sizes, *each, dtype, device) for each in sizes.decode),
        *(_prefill(sizes, *each, dtype, device) for each in sizes.prefill),
        *(_latent(sizes, *each, dtype, device) for each in sizes.decode),
        _rope_and_write(sizes, dtype, device),
        _add_rms_norm(sizes, dtype, device),
        _silu_and_mul(sizes, dtype, device),
        *(_experts(sizes, rows, dtype, device) for rows in (min(32, sizes.rows), sizes.rows)),
        *(_delta_step(sizes, device, per_channel=each) for each in (False, True)),
        *(_delta_scan(sizes, device, per_channel=each) for each in (False, True)),
        _lightning_step(sizes, device),
        _lightning_scan(sizes, device),
        _draw(sizes, device),
        *(_block_copy(sizes, dtype, device, scatters=each) for each in (False, True)),
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
        lambda: attention.paged_prefill_attention(
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
    tiles = grouped_gemm.plan_tiles(chosen, experts)
    places, ordered = tiles.order // top_k, chosen.flatten()[tiles.order]
    used = len(torch.unique(chosen))
    return KernelCase(
        "grouped GEMM",
        f"{rows} rows, {top_k} of {experts} experts",
        lambda: grouped_gemm.grouped_gemm(x, weights, places, tiles),
        lambda: grouped_gemm.grouped_product(x, weights, places, ordered),
        num_bytes=used * weights[0].nbytes + x.nbytes + rows * top_k * columns * dtype.itemsize,
        flops=2 * rows * top_k * depth * columns,
    )


def _rule(
    sizes: Sizes, count: int, device: torch.device, *, per_channel: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads, dim = sizes.state
    q, k = (
        linear_reference.l2_normalize(torch.randn(count, heads, dim, device=device))
        for _ in range(2)
    )
    v, beta = torch.randn(count, heads, dim, device=device), torch.rand(count, heads, device=device)
    return q, k, v, -torch.rand(count, heads, dim if per_channel else 1, device=device), beta


def _rule_name(per_channel: bool) -> str:
    return "KDA" if per_channel else "gated delta rule"


def _delta_step(sizes: Sizes, device: torch.device, *, per_channel: bool) -> KernelCase:
    count, (heads, dim) = min(32, sizes.rows), sizes.state
    inputs = _rule(sizes, count, device, per_channel=per_channel)
    state = torch.randn(count, heads, dim, dim, device=device)
    return KernelCase(
        f"{_rule_name(per_channel)}, step",
        f"batch {count}, {heads} heads of {dim} x {dim}",
        lambda: delta_rule.delta_step(*inputs, state),
        lambda: linear_reference.delta_step(*inputs, state),
        num_bytes=2 * state.nbytes,
    )


def _delta_scan(sizes: Sizes, device: torch.device, *, per_channel: bool) -> KernelCase:
    heads, dim = sizes.state
    inputs = _rule(sizes, sizes.positions, device, per_channel=per_channel)
    state = torch.zeros(heads, dim, dim, device=device)
    return KernelCase(
        f"{_rule_name(per_channel)}, prefill",
        f"{sizes.positions} positions, {heads} heads of {dim} x {dim}",
        lambda: delta_rule.delta_scan(*inputs, state),
        lambda: linear_reference.delta_scan(*inputs, state),
        num_bytes=4 * inputs[0].nbytes,
        flops=8 * sizes.positions * heads * dim * dim,
    )


def _lightning_step(sizes: Sizes, device: torch.device) -> KernelCase:
    count, (heads, dim) = min(32, sizes.rows), sizes.state
    q, k, v, _, _ = _rule(sizes, count, device)
    slopes = torch.rand(heads, device=device)
    state = torch.randn(count, heads, dim, dim, device=device)
    return KernelCase(
        "lightning attention, step",
        f"batch {count}, {heads} heads of {dim} x {dim}",
        lambda: lightning.lightning_step(q, k, v, slopes, state),
        lambda: lightning_reference.lightning_step(q, k, v, slopes, state),
        num_bytes=2 * state.nbytes,
    )


def _lightning_scan(sizes: Sizes, device: torch.device) -> KernelCase:
    heads, dim = sizes.state
    q, k, v, _, _ = _rule(sizes, sizes.positions, device)
    slopes = torch.rand(heads, device=device)
    state = torch.zeros(heads, dim, dim, device=device)
    return KernelCase(
        "lightning attention, prefill",
        f"{sizes.positions} positions, {heads} heads of {dim} x {dim}",
        lambda: lightning.lightning_scan(q, k, v, slopes, state),
        lambda: lightning_reference.lightning_scan(q, k, v, slopes, state),
        num_bytes=4 * q.nbytes,
        flops=4 * sizes.positions * heads * dim * dim,
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
