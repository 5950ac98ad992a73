"""KV of a decode step with constant shapes: all inputs are tensors, none are lists.

Each class replaces the one of the same purpose that is planned per step (`dispatch.py`,
`latent.py`, `states.py`). It reads views of buffers that are filled before the step, so a step can
be captured once and replayed. Each row is one token of one sequence; rows beyond the batch point to
a block that is never allocated.
Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.kernels import attention_reference, host, layer_ops
from kvmesh.kernels.attention_sizes import num_decode_splits
from kvmesh.kernels.heads import HeadSpec, RopeRows
from kvmesh.kernels.latent import decode_on_cpu
from kvmesh.kernels.states import Recurrence, StatePlaces, carried


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Slots and contexts of the rows of one token group.

    Attributes:
        slots: [rows] int64, slot for each row's own KV.
        lens: [rows] int64, at least 1, number of positions that each row attends to, ending with
            its own.
        tables: [rows, longest] int64; entries after a context may be any block.
    """

    slots: Tensor
    lens: Tensor
    tables: Tensor


class StaticAttention:
    """See `dispatch.StepAttention`: one token of each row's sequence.

    Args:
        by_kernel: whether to use the Triton kernel; None for pools on a device.
    """

    def __init__(self, rows: GroupRows, kv: Tensor, *, by_kernel: bool | None = None) -> None:
        self._rows = rows
        self._kv = kv
        self._by_kernel = kv.is_cuda if by_kernel is None else by_kernel
        self._on_host = host.has_attention(kv)

    def run(self, qkv: Tensor, layer: int, spec: HeadSpec, rope: RopeRows) -> Tensor:
        """See `StepAttention.run`."""
        rows, kv = self._rows, self._kv
        layer_ops.rope_and_write(
            qkv,
            spec.qk_norm,
            spec.norm_eps,
            rope.cos,
            rope.signed_sin,
            kv,
            layer,
            rows.slots,
        )
        q = qkv[:, : qkv.shape[1] - 2 * kv.shape[4]]
        if self._by_kernel:
            return self._on_device(q, layer, spec)
        attend = host.decode_attention if self._on_host else static_decode_attention
        return attend(
            q,
            kv,
            layer,
            rows.tables,
            rows.lens,
            scale=spec.scale,
            window=spec.window,
            sinks=spec.sinks,
            cap=spec.cap,
        )

    def _on_device(self, q: Tensor, layer: int, spec: HeadSpec) -> Tensor:
        # Triton takes half a second to import and is needed only with a device.
        from kvmesh.kernels import attention  # noqa: PLC0415

        tables, kv = self._rows.tables, self._kv
        longest = tables.shape[1] * kv.shape[3]
        out: Tensor = attention.paged_decode_attention(
            q,
            kv,
            layer,
            tables,
            self._rows.lens,
            max_context_len=0,
            num_splits=num_decode_splits(len(tables) * kv.shape[4], longest),
            scale=spec.scale,
            window=spec.window,
            sinks=spec.sinks,
            cap=spec.cap,
        )
        return out


def static_decode_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    tables: Tensor,
    lens: Tensor,
    *,
    scale: float,
    window: int,
    sinks: Tensor | None,
    cap: float = 0.0,
) -> Tensor:
    """Twin of `host.decode_attention`, with the same arguments; gathers whole tables.

    Args:
        cap: bound of soft-capping, see `reference.capped`.
    """
    _, layers, _, size, kv_heads, head_dim = kv.shape
    span = tables.shape[1] * size
    positions = torch.arange(span, device=q.device)
    ahead = lens[:, None] - positions
    visible = ahead > 0
    if window:
        visible &= ahead <= window
    keys = tables * (layers * 2) + 2 * layer
    pool = kv.view(-1, size * kv_heads * head_dim)
    both = functional.embedding(torch.stack([keys, keys + 1]), pool)
    both = both.view(2, len(q), span, kv_heads, head_dim).transpose(2, 3)
    # Invisible positions may hold NaN, and 0 * NaN is NaN: the mask alone is not enough.
    k, v = both.masked_fill(~visible[:, None, :, None], 0)
    mask = torch.zeros(visible.shape, dtype=kv.dtype, device=q.device)
    mask = mask.masked_fill(~visible, -torch.inf)[:, None, None]
    grouped = q.reshape(len(q), kv_heads, -1, head_dim)
    if sinks is not None or cap:
        columns = None if sinks is None else sinks.view(kv_heads, -1, 1)
        out = attention_reference.attention_by_scores(grouped, k, v, mask, scale, columns, cap)
    else:
        out = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return out.reshape(q.shape)


class StaticLatent:
    """See `latent.LatentMemory`: one token of each row's sequence.

    Args:
        kv: [num_blocks, layers, block_size, width]; changed in place.
    """

    def __init__(self, rows: GroupRows, kv: Tensor) -> None:
        self._rows = rows
        self._kv = kv
        self.num_decode = len(rows.slots)
        _, layers, size, _ = kv.shape
        self._places = rows.slots // size * (layers * size) + rows.slots % size

    def write(self, vectors: Tensor, layer: int) -> None:
        """See `LatentMemory.write`."""
        size, width = self._kv.shape[2:]
        self._kv.view(-1, width).index_copy_(0, self._places + layer * size, vectors)

    def decode(self, q: Tensor, layer: int, *, scale: float, rank: int) -> Tensor:
        """See `LatentMemory.decode`."""
        tables, lens = self._rows.tables, self._rows.lens
        if not self._kv.is_cuda:
            return decode_on_cpu(q, self._kv, layer, tables, lens, scale=scale, rank=rank)
        from kvmesh.kernels import latent_attention  # noqa: PLC0415 - as above

        out: Tensor = latent_attention.latent_decode_attention(
            q, self._kv, layer, tables, lens, scale=scale, rank=rank, by_length=True
        )
        return out

    def chunks(self, layer: int) -> Iterator[tuple[slice, Tensor]]:
        """See `LatentMemory.chunks`: there are none."""
        del layer
        return iter(())


@dataclass(frozen=True, slots=True)
class StaticStates:
    """See `states.States`: one position of each row's sequence.

    Copies of states to save are made block by block after the step.

    Attributes:
        live, source: [rows, blocks of a state] int64.
        fresh: [rows] bool, rows at the beginning of their sequence.
        pool: [num_blocks, block bytes / 4] fp32; changed in place.
    """

    live: Tensor
    source: Tensor
    fresh: Tensor
    pool: Tensor

    def run(self, part: int, slot: int, values: int, recurrence: Recurrence) -> Tensor:
        """See `States.run`."""
        field = self.pool[:, slot * values : (slot + 1) * values]
        places = StatePlaces(field, self.source[:, part], self.live[:, part], self.fresh)
        return carried(recurrence, slice(0, len(self.live)), places)
