"""Attention of a step, planned once and run per layer: Triton on CUDA, `host.h` with blocks in
place on the CPU, the torch twins elsewhere.
Tests: tests/unit/kernels/test_dispatch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from kvmesh.kernels import attention_reference, host, host_layer, layer_ops, reference
from kvmesh.kernels.attention_sizes import num_decode_splits
from kvmesh.kernels.heads import HeadSpec, RopeRows
from kvmesh.kernels.plan import RaggedBatch, decode_buckets, padded_tables, slots_of
from kvmesh.kernels.upload import sent

AfterWrite = Callable[[int], None]
"""Called in each layer, with its number in a block, after its KV is written, before attention."""


class StepAttention(Protocol):
    """Attention for one step."""

    def run(self, qkv: Tensor, layer: int, spec: HeadSpec, rope: RopeRows) -> Tensor:
        """Rotates queries and keys, writes keys and values to their slots, then attends.

        Args:
            qkv: [rows, heads + 2 * kv_heads, head_dim], contiguous; changed in place.

        Returns:
            [rows, heads, head_dim].
        """
        ...


class ReferenceAttention:
    """Attention by the torch twins: decode in buckets of similar length, prefill chunk by chunk."""

    def __init__(
        self, batch: RaggedBatch, kv: Tensor, after_write: AfterWrite | None = None
    ) -> None:
        self._batch = batch
        self._kv = kv
        self._after_write = after_write
        self._slots = torch.from_numpy(slots_of(batch)).to(kv.device)
        # Layers of one model have at most a few windows; indexes are computed once for each.
        self._decode_plans: dict[int, list[tuple[slice, attention_reference.DecodePlan]]] = {}
        self._prefill_plans: dict[int, list[tuple[slice, attention_reference.PrefillPlan]]] = {}

    def run(self, qkv: Tensor, layer: int, spec: HeadSpec, rope: RopeRows) -> Tensor:
        """See `StepAttention.run`."""
        self._write(qkv, layer, spec, rope)
        if self._after_write is not None:
            self._after_write(layer)
        kv_heads = self._kv.shape[4]
        heads = qkv.shape[1] - 2 * kv_heads
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        cut = self._batch.num_decode
        parts = [self._decode(q[:cut], layer, spec)] if cut else []
        if cut < self._batch.num_sequences:
            parts += self._prefill(q, k, v, layer, spec)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _write(self, qkv: Tensor, layer: int, spec: HeadSpec, rope: RopeRows) -> None:
        reference.rope_and_write(
            qkv,
            spec.qk_norm,
            spec.norm_eps,
            rope.cos,
            rope.signed_sin,
            self._kv,
            layer,
            self._slots,
        )

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, layer: int, spec: HeadSpec) -> list[Tensor]:
        """Computes attention of the chunks; `q`, `k` and `v` have all rows of the step."""
        if spec.window not in self._prefill_plans:
            self._prefill_plans[spec.window] = self._plan_prefill(spec.window)
        return [
            attention_reference.prefill_attention(
                q[rows],
                k[rows],
                v[rows],
                self._kv,
                layer,
                plan,
                spec.scale,
                spec.sinks,
                cap=spec.cap,
            )
            for rows, plan in self._prefill_plans[spec.window]
        ]

    def _decode(self, q: Tensor, layer: int, spec: HeadSpec) -> Tensor:
        if spec.window not in self._decode_plans:
            self._decode_plans[spec.window] = self._plan_decode(spec.window)
        parts = [
            attention_reference.decode_attention(
                q[rows], self._kv, layer, plan, spec.scale, spec.sinks, cap=spec.cap
            )
            for rows, plan in self._decode_plans[spec.window]
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _plan_decode(self, window: int) -> list[tuple[slice, attention_reference.DecodePlan]]:
        batch = self._batch
        num_blocks = [len(table) for table in batch.block_tables[: batch.num_decode]]
        runs = [slice(run.start, run.stop) for run in decode_buckets(num_blocks)]
        return [
            (
                run,
                attention_reference.plan_decode(
                    batch.block_tables[run], batch.context_lens[run], self._kv, window
                ),
            )
            for run in runs
        ]

    def _plan_prefill(self, window: int) -> list[tuple[slice, attention_reference.PrefillPlan]]:
        batch = self._batch
        return [
            (
                slice(batch.query_starts[sequence], batch.query_starts[sequence + 1]),
                attention_reference.plan_prefill(
                    batch.block_tables[sequence],
                    batch.context_lens[sequence],
                    batch.query_len(sequence),
                    self._kv,
                    window,
                ),
            )
            for sequence in range(batch.num_decode, batch.num_sequences)
        ]


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Chunks of prompts in a step.

    Attributes:
        tables: [chunks, blocks] int64.
        starts: [chunks + 1] int64, rows counted from the first chunk's.
        lens: [chunks] int64.
    """

    tables: Tensor
    starts: Tensor
    lens: Tensor

    @classmethod
    def of(cls, batch: RaggedBatch) -> Self:
        cut = batch.num_decode
        return cls(
            torch.from_numpy(padded_tables(batch.block_tables[cut:])),
            torch.tensor(batch.query_starts[cut:], dtype=torch.int64) - cut,
            torch.tensor(batch.context_lens[cut:], dtype=torch.int64),
        )


class HostAttention(ReferenceAttention):
    """`ReferenceAttention` that reads blocks in place and fuses the rotation."""

    def __init__(
        self, batch: RaggedBatch, kv: Tensor, after_write: AfterWrite | None = None
    ) -> None:
        super().__init__(batch, kv, after_write)
        cut = batch.num_decode
        self._tables = torch.from_numpy(padded_tables(batch.block_tables[:cut]))
        self._lens = torch.tensor(batch.context_lens[:cut], dtype=torch.int64)
        self._chunks: _Chunks | None = None
        if cut < batch.num_sequences:
            self._chunks = _Chunks.of(batch)
        self.decode_rows: host_layer.DecodeRows | None = None
        """Rows for native calls of whole layers, in a step of decode rows only."""
        if 0 < cut == batch.num_sequences and host.has_rope(kv):
            self.decode_rows = host_layer.DecodeRows(kv, self._slots, self._tables, self._lens)

    def _write(self, qkv: Tensor, layer: int, spec: HeadSpec, rope: RopeRows) -> None:
        layer_ops.rope_and_write(
            qkv,
            spec.qk_norm,
            spec.norm_eps,
            rope.cos,
            rope.signed_sin,
            self._kv,
            layer,
            self._slots,
        )

    def _decode(self, q: Tensor, layer: int, spec: HeadSpec) -> Tensor:
        return host.decode_attention(
            q,
            self._kv,
            layer,
            self._tables,
            self._lens,
            scale=spec.scale,
            window=spec.window,
            sinks=spec.sinks,
            cap=spec.cap,
        )

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, layer: int, spec: HeadSpec) -> list[Tensor]:
        chunks = self._chunks
        assert chunks is not None, "the step has chunks"
        attended = host.prefill_attention(
            q[self._batch.num_decode :],
            self._kv,
            layer,
            chunks.tables,
            chunks.starts,
            chunks.lens,
            scale=spec.scale,
            window=spec.window,
            sinks=spec.sinks,
            cap=spec.cap,
        )
        return [attended]


class TritonAttention:
    """Attention by the Triton kernels: one launch for all decode rows, one for all chunks."""

    def __init__(
        self, batch: RaggedBatch, kv: Tensor, after_write: AfterWrite | None = None
    ) -> None:
        # Triton takes half a second to import and is needed only with a device.
        from kvmesh.kernels import attention, fused, prompt_attention  # noqa: PLC0415

        self._decode = attention.paged_decode_attention
        self._prefill = prompt_attention.paged_prefill_attention
        self._rope_and_write = fused.rope_and_write
        self._after_write = after_write
        self._kv = kv
        self._num_decode = batch.num_decode
        self._num_prefill = batch.num_sequences - batch.num_decode
        self._slots = sent(slots_of(batch), torch.int64, kv.device)

        def on_device(values: object) -> Tensor:
            return sent(values, torch.int32, kv.device)

        self._tables = on_device(padded_tables(batch.block_tables))
        self._lens = on_device(batch.context_lens)
        starts = np.asarray(batch.query_starts)[batch.num_decode :]
        self._starts = on_device(starts - batch.num_decode)
        self._max_query_len = int(np.diff(starts).max(initial=0))
        self._max_context_len = max(batch.context_lens[: batch.num_decode], default=0)

    def run(self, qkv: Tensor, layer: int, spec: HeadSpec, rope: RopeRows) -> Tensor:
        """See `StepAttention.run`."""
        self._rope_and_write(
            qkv,
            spec.qk_norm,
            spec.norm_eps,
            rope.cos,
            rope.signed_sin,
            self._kv,
            layer,
            self._slots,
        )
        if self._after_write is not None:
            self._after_write(layer)
        kv_heads = self._kv.shape[4]
        q, cut = qkv[:, : qkv.shape[1] - 2 * kv_heads], self._num_decode
        parts = []
        if cut:
            parts.append(
                self._decode(
                    q[:cut],
                    self._kv,
                    layer,
                    self._tables[:cut],
                    self._lens[:cut],
                    max_context_len=self._max_context_len,
                    num_splits=num_decode_splits(cut * kv_heads, self._max_context_len),
                    scale=spec.scale,
                    window=spec.window,
                    sinks=spec.sinks,
                    cap=spec.cap,
                )
            )
        if self._num_prefill:
            parts.append(
                self._prefill(
                    q[cut:],
                    self._kv,
                    layer,
                    self._tables[cut:],
                    self._starts,
                    self._lens[cut:],
                    max_query_len=self._max_query_len,
                    scale=spec.scale,
                    window=spec.window,
                    sinks=spec.sinks,
                    cap=spec.cap,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def plan_attention(
    batch: RaggedBatch, kv: Tensor, after_write: AfterWrite | None = None
) -> StepAttention:
    """Returns the attention of one step, on the device of the pool.

    Args:
        after_write: not called by native calls that compute whole layers of decode rows.
    """
    if kv.is_cuda:
        return TritonAttention(batch, kv, after_write)
    if host.has_attention(kv):
        return HostAttention(batch, kv, after_write)
    return ReferenceAttention(batch, kv, after_write)
