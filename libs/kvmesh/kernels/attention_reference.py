"""Attention over paged KV in plain torch: the CPU path and the kernels' oracle.

`kv` is the whole pool, as in `reference.py`. Indexes are computed once per step (`plan_*`),
attention once per layer. Tests: tests/unit/kernels/test_reference.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.kernels.plan import padded_tables
from kvmesh.kernels.reference import capped

# Maximum number of whole-context scores in memory at once, and minimum rows worth a call.
_SCORES = 8 << 20
_FEWEST_ROWS = 8


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Indexes of one batch of decode sequences.

    Attributes:
        gather: [2 * sequences * blocks] int64, rows of layer 0 in the pool viewed as
            `[num_blocks * layers * 2, ...]`; all keys, then all values.
        mask: [sequences, 1, 1, blocks * block_size], 0 or -inf in the pool's dtype.
        spare: gathered positions outside of the contexts that may be uninitialised, in the
            gathered tensor viewed as `[positions, ...]`, or None.
        num_sequences: number of sequences in the batch.
    """

    gather: Tensor
    mask: Tensor
    spare: Tensor | None
    num_sequences: int


def plan_decode(
    block_tables: Sequence[Sequence[int]], context_lens: Sequence[int], kv: Tensor, window: int = 0
) -> DecodePlan:
    """Prepares `decode_attention` for sequences with one query each.

    Args:
        window: number of latest positions that a query sees, its own included; 0 for all.
    """
    _, layers, _, size, _, _ = kv.shape
    tables = padded_tables(block_tables)
    span = tables.shape[1] * size
    keys = tables.reshape(-1) * (layers * 2)
    lens = np.asarray(context_lens)
    positions = np.arange(span)
    visible = positions < lens[:, None]
    if window:
        visible &= positions >= lens[:, None] - window
    mask = np.where(visible, np.float32(0), np.float32(-np.inf))
    # The tail of the last block may hold NaN, and 0 * NaN is NaN: the mask alone is not enough.
    spare = [
        sequence * span + position
        for sequence, length in enumerate(context_lens)
        for position in range(length, -(-length // size) * size)
    ]
    spare_rows = np.array([*spare, *(len(lens) * span + row for row in spare)], dtype=np.int64)
    return DecodePlan(
        gather=torch.from_numpy(np.concatenate([keys, keys + 1])).to(kv.device),
        mask=torch.from_numpy(mask).to(kv.device, kv.dtype)[:, None, None, :],
        spare=torch.from_numpy(spare_rows).to(kv.device) if spare else None,
        num_sequences=len(lens),
    )


def decode_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    plan: DecodePlan,
    scale: float,
    sinks: Tensor | None = None,
    *,
    cap: float = 0.0,
) -> Tensor:
    """Computes attention of one query per sequence over its blocks.

    The queries of one KV head become rows of one matrix, so grouped heads cost no copy of K or V.

    Args:
        q: [sequences, heads, head_dim].
        scale: factor of the scores.
        sinks: [heads], a logit per head that takes a share of the softmax and has no value.
        cap: bound of soft-capping, see `capped`.

    Returns:
        [sequences, heads, head_dim].

    Source: PagedAttention, arXiv 2309.06180 §4.1.
    """
    grouped, k, v = _gathered(q, kv, layer, plan)
    if sinks is not None or cap:
        columns = None if sinks is None else sinks.view(grouped.shape[1], -1, 1)
        out = attention_by_scores(grouped, k, v, plan.mask, scale, columns, cap)
        return out.reshape(q.shape)
    out = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=plan.mask, scale=scale)
    return out.reshape(q.shape)


def _gathered(q: Tensor, kv: Tensor, layer: int, plan: DecodePlan) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries by KV head, and copies of their contexts' keys and values, heads second.

    Returns:
        [sequences, kv_heads, heads of one, head_dim] and twice [sequences, kv_heads, longest,
        head_dim].
    """
    _, _, _, size, kv_heads, head_dim = kv.shape
    pool = kv.view(-1, size * kv_heads * head_dim)[2 * layer :]
    both = functional.embedding(plan.gather, pool)
    if plan.spare is not None:
        both.view(-1, kv_heads * head_dim).index_fill_(0, plan.spare, 0)
    k, v = both.view(2, plan.num_sequences, -1, kv_heads, head_dim).transpose(2, 3)
    return q.view(plan.num_sequences, kv_heads, -1, head_dim), k, v


def attention_by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    sinks: Tensor | None,
    cap: float = 0.0,
) -> Tensor:
    """Computes attention with materialised scores, for features that fused attention lacks.

    Args:
        q: [..., queries, head_dim].
        k, v: [..., positions, head_dim].
        mask: broadcastable to [..., queries, positions], 0 or -inf.
        sinks: broadcastable to [..., queries, 1], an extra logit of each query without a value;
            or None.
        cap: bound of soft-capping, see `capped`.

    Source: the "attention sinks" of gpt-oss; StreamingLLM, arXiv 2309.17453 §3.2.
    """
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if cap:
        scores = capped(scores, cap)
    scores = scores + mask
    if sinks is None:
        return torch.softmax(scores, dim=-1).to(v.dtype) @ v
    logits = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    return torch.softmax(logits, dim=-1)[..., :-1].to(v.dtype) @ v


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Indexes of one prefill chunk.

    Attributes:
        gather: as in `DecodePlan`, for a chunk after cached positions, else None.
        mask: [queries, context], 0 or -inf; None for plain causal attention from position 0.
        context_len: number of cached positions and the chunk's own.
    """

    gather: Tensor | None
    mask: Tensor | None
    context_len: int


def plan_prefill(
    block_table: Sequence[int], context_len: int, num_queries: int, kv: Tensor, window: int = 0
) -> PrefillPlan:
    """Prepares `prefill_attention` for the last `num_queries` positions of a context.

    Args:
        window: number of latest positions that a query sees, its own included; 0 for all.
    """
    cached = context_len - num_queries
    gather = None
    if cached:
        keys = torch.tensor(block_table, dtype=torch.int64, device=kv.device) * (kv.shape[1] * 2)
        gather = torch.cat([keys, keys + 1])
    windowed = 0 < window < context_len
    if not (cached or windowed):
        return PrefillPlan(None, None, context_len)
    mask = torch.full((num_queries, context_len), -torch.inf, dtype=kv.dtype, device=kv.device)
    mask.triu_(cached + 1)
    if windowed:
        mask += torch.full_like(mask, -torch.inf).tril_(cached - window)
    return PrefillPlan(gather, mask, context_len)


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    layer: int,
    plan: PrefillPlan,
    scale: float,
    sinks: Tensor | None = None,
    *,
    cap: float = 0.0,
) -> Tensor:
    """Computes causal attention of a chunk over its cached prefix and itself.

    Args:
        q: [queries, heads, head_dim].
        k, v: [queries, kv_heads, head_dim] of the chunk; its slots in `kv` are written already.
        sinks, cap: as in `decode_attention`.

    Returns:
        [queries, heads, head_dim].
    """
    _, _, _, size, kv_heads, head_dim = kv.shape
    if plan.gather is not None:
        pool = kv.view(-1, size * kv_heads * head_dim)[2 * layer :]
        both = functional.embedding(plan.gather, pool).view(2, -1, kv_heads, head_dim)
        k, v = both[0, : plan.context_len], both[1, : plan.context_len]
    # KV heads become the batch axis and their query heads the head axis: K and V are not repeated.
    grouped = q.view(len(q), kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    if sinks is not None or cap:
        return _prefill_by_scores(grouped, k, v, plan.mask, scale, sinks, cap).reshape(q.shape)
    shape = (kv_heads, grouped.shape[1], len(k), head_dim)
    out = functional.scaled_dot_product_attention(
        grouped,
        k.transpose(0, 1)[:, None].expand(shape),
        v.transpose(0, 1)[:, None].expand(shape),
        attn_mask=plan.mask,
        is_causal=plan.mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(q.shape)


def _prefill_by_scores(
    grouped: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None,
    cap: float,
) -> Tensor:
    """Variant of `prefill_attention` with materialised scores, for some query rows at a time.

    Args:
        grouped: [kv_heads, group, queries, head_dim].

    Returns:
        [queries, kv_heads, group, head_dim].
    """
    keys, values = k.transpose(0, 1)[:, None], v.transpose(0, 1)[:, None]
    columns = None if sinks is None else sinks.view(len(grouped), -1, 1, 1)
    # One result for all rows: small allocations between large scores would fragment the heap.
    out = torch.empty_like(grouped)
    step = max(_FEWEST_ROWS, _SCORES // (grouped.shape[0] * grouped.shape[1] * len(k)))
    for first in range(0, grouped.shape[2], step):
        q = grouped[:, :, first : first + step]
        if mask is None:
            hidden = torch.full((q.shape[2], len(k)), -torch.inf, device=q.device)
            hidden.triu_(first + 1)
        else:
            hidden = mask[first : first + step]
        part = attention_by_scores(q, keys, values, hidden, scale, columns, cap)
        out[:, :, first : first + step] = part
    return out.permute(2, 0, 1, 3)


def merge_partials(out: Tensor, lse: Tensor) -> Tensor:
    """Merges attention over parts of a context into attention over all of it.

    Args:
        out: [..., parts, head_dim] fp32, each normalised over its own part.
        lse: [..., parts] fp32, log of the sum of exponentials; -inf for an empty part.

    Returns:
        [..., head_dim] fp32.

    Source: FlashInfer, arXiv 2501.01005 §2.2.
    """
    return (torch.softmax(lse, dim=-1).unsqueeze(-1) * out).sum(dim=-2)
