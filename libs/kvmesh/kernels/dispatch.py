"""Attention of a step, planned once and run per layer: Triton on CUDA, the torch twins elsewhere.

Tests: tests/unit/kernels/test_dispatch.py.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvmesh.kernels import reference
from kvmesh.kernels.plan import RaggedBatch, decode_buckets, padded_tables, slots_of


class StepAttention(Protocol):
    """Attention for one step."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Writes `k` and `v` to their slots, then attends.

        Args:
            q: [rows, heads, head_dim].
            k, v: [rows, kv_heads, head_dim].

        Returns:
            [rows, heads, head_dim].
        """
        ...


class ReferenceAttention:
    """Attention by the torch twins: decode in buckets of similar length, prefill chunk by chunk."""

    def __init__(self, batch: RaggedBatch, kv: Tensor, scale: float) -> None:
        self._kv = kv
        self._scale = scale
        self._slots = reference.key_slots(torch.from_numpy(slots_of(batch)).to(kv.device), kv)
        num_blocks = [len(table) for table in batch.block_tables[: batch.num_decode]]
        self._decode = [
            (
                slice(run.start, run.stop),
                reference.plan_decode(
                    batch.block_tables[run.start : run.stop],
                    batch.context_lens[run.start : run.stop],
                    kv,
                ),
            )
            for run in decode_buckets(num_blocks)
        ]
        self._prefill = [
            (
                slice(batch.query_starts[sequence], batch.query_starts[sequence + 1]),
                reference.plan_prefill(
                    batch.block_tables[sequence],
                    batch.context_lens[sequence],
                    batch.query_len(sequence),
                    kv,
                ),
            )
            for sequence in range(batch.num_decode, batch.num_sequences)
        ]

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """See `StepAttention.run`."""
        kv, scale = self._kv, self._scale
        reference.write_kv(k, v, kv, layer, self._slots)
        parts = [
            reference.decode_attention(q[rows], kv, layer, decode, scale)
            for rows, decode in self._decode
        ]
        parts += [
            reference.prefill_attention(q[rows], k[rows], v[rows], kv, layer, prefill, scale)
            for rows, prefill in self._prefill
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class TritonAttention:
    """Attention by the Triton kernels: one launch for all decode rows, one for all chunks."""

    def __init__(self, batch: RaggedBatch, kv: Tensor, scale: float) -> None:
        # Triton costs half a second to import and is only needed where there is a device.
        from kvmesh.kernels import attention  # noqa: PLC0415

        self._kernels = attention
        self._kv = kv
        self._scale = scale
        self._num_decode = batch.num_decode
        self._num_prefill = batch.num_sequences - batch.num_decode
        self._slots = reference.key_slots(torch.from_numpy(slots_of(batch)).to(kv.device), kv)

        def on_device(values: object) -> Tensor:
            return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(kv.device)

        self._tables = on_device(padded_tables(batch.block_tables))
        self._lens = on_device(batch.context_lens)
        starts = np.asarray(batch.query_starts)[batch.num_decode :]
        self._starts = on_device(starts - batch.num_decode)
        self._max_query_len = int(np.diff(starts).max(initial=0))
        self._max_context_len = max(batch.context_lens[: batch.num_decode], default=0)

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """See `StepAttention.run`."""
        reference.write_kv(k, v, self._kv, layer, self._slots)
        cut = self._num_decode
        parts = []
        if cut:
            parts.append(
                self._kernels.paged_decode_attention(
                    q[:cut],
                    self._kv,
                    layer,
                    self._tables[:cut],
                    self._lens[:cut],
                    max_context_len=self._max_context_len,
                    num_splits=self._kernels.num_decode_splits(
                        cut, k.shape[1], self._max_context_len
                    ),
                    scale=self._scale,
                )
            )
        if self._num_prefill:
            parts.append(
                self._kernels.paged_prefill_attention(
                    q[cut:],
                    self._kv,
                    layer,
                    self._tables[cut:],
                    self._starts,
                    self._lens[cut:],
                    max_query_len=self._max_query_len,
                    scale=self._scale,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def plan_attention(batch: RaggedBatch, kv: Tensor, scale: float) -> StepAttention:
    """The attention of one step, on the device of the pool."""
    if kv.is_cuda:
        return TritonAttention(batch, kv, scale)
    return ReferenceAttention(batch, kv, scale)
