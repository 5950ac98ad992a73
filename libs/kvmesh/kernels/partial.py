"""Attention of many queries of one sequence over a part of its context, with its log-sum-exp.

`kv` is the whole pool, as in `reference.py`. On the CPU `prefill.h` reads blocks in place; without
it torch's flash attention is used, which also returns the sums. On other devices
the plain twin is used, which is also the oracle.
Tests: tests/unit/kernels/test_partial.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvmesh.kernels import host

# Maximum number of scores in memory at once, in the twin.
_SCORES = 8 << 20


class Part:
    """A part of one sequence's context, planned once and attended to in any layer.

    Args:
        blocks: blocks that hold its positions, in order.
        num_queries: number of queries, which belong to the part's last positions and see none after
            their own. 0 means that queries belong to later positions and see all.
    """

    def __init__(
        self, kv: Tensor, blocks: Sequence[int], num_positions: int, num_queries: int = 0
    ) -> None:
        self._kv = kv
        self._blocks = torch.tensor(blocks, dtype=torch.int64, device=kv.device)
        self._num_positions = num_positions
        self._is_causal = num_queries > 0
        self._in_place = host.has_attention(kv)
        self._mask = None
        if num_queries and not self._in_place:
            self._mask = causal_mask(num_queries, num_positions, kv)

    def attend(self, q: Tensor, layer: int, scale: float) -> tuple[Tensor, Tensor]:
        """See `partial_prefill`."""
        kv, count = self._kv, self._num_positions
        if self._in_place:
            return host.partial_prefill(
                q, kv, layer, self._blocks, count, scale, causal=self._is_causal
            )
        k, v = gather_part(kv, layer, self._blocks, count)
        return partial_prefill(q, k, v, scale, self._mask)


def gather_part(
    kv: Tensor, layer: int, blocks: Tensor, num_positions: int
) -> tuple[Tensor, Tensor]:
    """Copies keys and values of a run of positions.

    Args:
        blocks: [blocks] int64, blocks that hold the positions, in order.

    Returns:
        Both [positions, kv_heads, head_dim], copies.
    """
    kv_heads, head_dim = kv.shape[4:]

    def run(part: Tensor) -> Tensor:
        return part.index_select(0, blocks).view(-1, kv_heads, head_dim)[:num_positions]

    return run(kv[:, layer, 0]), run(kv[:, layer, 1])


def causal_mask(num_queries: int, num_positions: int, like: Tensor) -> Tensor | None:
    """Returns a mask that hides later positions from the queries of a part's last positions.

    Returns:
        [queries, positions], 0 or -inf, in the dtype of `like`; None if nothing is hidden.
    """
    if num_queries == 1:
        return None
    shape = (num_queries, num_positions)
    mask = torch.full(shape, -torch.inf, dtype=like.dtype, device=like.device)
    return mask.triu_(num_positions - num_queries + 1)


def partial_prefill(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes attention over one part of a context, normalised over that part.

    Args:
        q: [queries, heads, head_dim].
        k, v: [positions, kv_heads, head_dim], the dtype of `q`.
        scale: factor of the scores.
        mask: of `causal_mask`, for queries of the part's own positions; None if they see all.

    Returns:
        [queries, heads, head_dim] in the dtype of `q`, and [queries, heads] fp32, the log of each
        sum of exponentials, for `join_parts`.

    Source: TokenLake §3.3 (a query travels to the KV); FlashInfer, arXiv 2501.01005 §2.2.
    """
    queries, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    # KV heads become the batch axis: keys and values are not repeated for their query heads.
    grouped = q.view(queries, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    keys, values = k.transpose(0, 1)[:, None], v.transpose(0, 1)[:, None]
    attend = _flash if q.device.type == "cpu" else partial_reference
    out, lse = attend(grouped, keys, values, mask, scale)
    out = out.permute(2, 0, 1, 3).reshape(q.shape)
    return out, lse.permute(2, 0, 1).reshape(queries, heads)


def join_parts(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """Merges attention over two parts of a context into attention over both.

    Args:
        first, second: outputs [queries, heads, head_dim] and sums [queries, heads] fp32; one sum
            may be -inf for an empty part.

    Returns:
        [queries, heads, head_dim]; the weights and the sum are computed in fp32.
    """
    share = torch.sigmoid(second[1] - first[1])[..., None]
    return torch.lerp(first[0].float(), second[0].float(), share).to(dtype)


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns a tensor's bytes in host memory: its own if contiguous there, else a copy."""
    flat = tensor.contiguous().cpu().view(-1).view(torch.uint8)
    view: memoryview = flat.numpy().data
    return view


def _flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    kv_heads, group, queries, head_dim = q.shape
    if mask is None:
        # All query heads of a KV head become rows of one matrix.
        q = q.reshape(kv_heads, 1, group * queries, head_dim)
    else:
        shape = (kv_heads, group, k.shape[2], head_dim)
        k, v = k.expand(shape), v.expand(shape)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    return out.reshape(kv_heads, group, queries, head_dim), lse.reshape(kv_heads, group, queries)


def partial_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes attention over a part in plain torch; the twin of the other ways.

    Args:
        q: [kv_heads, group, queries, head_dim].
        k, v: [kv_heads, 1, positions, head_dim].
        mask: [queries, positions], 0 or -inf, or None.

    Returns:
        The output, shaped like `q`, and [kv_heads, group, queries] fp32.
    """
    keys, values = k.float().transpose(-1, -2), v.float()
    out, sums = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    step = max(1, _SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    for first in range(0, q.shape[2], step):
        rows = slice(first, first + step)
        scores = q[:, :, rows].float() @ keys * scale
        if mask is not None:
            scores += mask[rows]
        lse = scores.logsumexp(dim=-1)
        sums[:, :, rows] = lse
        out[:, :, rows] = (torch.exp(scores - lse[..., None]) @ values).to(q.dtype)
    return out, sums
