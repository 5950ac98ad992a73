"""Attention of a step in which other workers hold a part of some sequences' contexts.

The rows of those sequences come last. Their queries are sent as soon as they are rotated. Meanwhile
this worker computes attention for all other rows, and for these rows over the local part.
Source: TokenLake §4.2. Tests: tests/integration/test_remote_prefix.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.kernels import layer_ops
from kvmesh.kernels.dispatch import plan_attention
from kvmesh.kernels.heads import HeadSpec, RopeRows
from kvmesh.kernels.partial import Part, bytes_of, join_parts
from kvmesh.kernels.plan import RaggedBatch, slots_of
from kvmesh.transfer.remote_attention import PendingAttention, RemoteAttention


@dataclass(slots=True)
class RemotePart:
    """The remote part of one sequence's context, during one step.

    Attributes:
        failure: why an answer is missing. After that no more queries are sent, and the step's
            result for this sequence is unusable.
    """

    attention: RemoteAttention
    failure: LostError | RefusedError | None = None

    def ask(self, layer: int, q: Tensor, scale: float) -> PendingAttention | None:
        """Sends the queries of a layer, [queries, heads, head_dim]; None after a failure."""
        if self.failure is not None:
            return None
        try:
            return self.attention.ask(layer, bytes_of(q), q.shape, scale)
        except (LostError, RefusedError) as error:
            self.failure = error
            return None

    def join(
        self, pending: PendingAttention | None, here: tuple[Tensor, Tensor], q: Tensor
    ) -> Tensor:
        """Merges attention over both parts; after a failure uses only the local part."""
        if pending is not None:
            try:
                answer = pending.wait()
            except (LostError, RefusedError) as error:
                self.failure = error
            else:
                out = torch.frombuffer(answer.output, dtype=q.dtype).view(q.shape)
                lse = torch.frombuffer(answer.lse, dtype=torch.float32).view(q.shape[:2])
                return join_parts(here, (out.to(q.device), lse.to(q.device)), q.dtype)
        return here[0]


class SplitAttention:
    """`StepAttention` with remote parts.

    Args:
        batch: contexts and tables without the remote parts; the last sequences are those of
            `parts`, whatever their number of rows.
    """

    def __init__(self, batch: RaggedBatch, kv: Tensor, parts: Sequence[RemotePart]) -> None:
        cut = batch.num_sequences - len(parts)
        self._kv = kv
        self._parts = parts
        self._first = first = batch.query_starts[cut]
        self._rest = plan_attention(_sequences(batch, 0, cut), kv) if cut else None
        self._batch = tail = _sequences(batch, cut, batch.num_sequences)
        self._slots = torch.from_numpy(slots_of(tail)).to(kv.device)
        self._here = [
            Part(kv, tail.block_tables[i], tail.context_lens[i], tail.query_len(i))
            for i in range(len(parts))
        ]
        assert first + tail.num_rows == batch.num_rows

    def run(self, qkv: Tensor, layer: int, spec: HeadSpec, rope: RopeRows) -> Tensor:
        """See `StepAttention.run`."""
        assert not spec.window, "a window is not asked for elsewhere"
        assert not spec.cap, "parts of a context are not bent"
        assert spec.sinks is None, "sinks belong to the whole context"
        first, kv = self._first, self._kv
        rows = qkv[first:]
        layer_ops.rope_and_write(
            rows,
            spec.qk_norm,
            spec.norm_eps,
            rope.cos[first:],
            rope.signed_sin[first:],
            kv,
            layer,
            self._slots,
        )
        q = rows[:, : qkv.shape[1] - 2 * kv.shape[4]]
        queries = [q[span] for span in self._spans()]
        pending = [
            part.ask(layer, each, spec.scale)
            for part, each in zip(self._parts, queries, strict=True)
        ]
        outs = []
        if self._rest is not None:
            before = RopeRows(rope.cos[:first], rope.signed_sin[:first])
            outs.append(self._rest.run(qkv[:first], layer, spec, before))
        # The local part includes the new rows.
        here = [
            part.attend(each, layer, spec.scale)
            for part, each in zip(self._here, queries, strict=True)
        ]
        outs += [
            part.join(answer, local, each)
            for part, answer, local, each in zip(self._parts, pending, here, queries, strict=True)
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _spans(self) -> list[slice]:
        starts = self._batch.query_starts
        return [slice(*span) for span in itertools.pairwise(starts)]


def _sequences(batch: RaggedBatch, begin: int, end: int) -> RaggedBatch:
    """Returns some sequences of a batch as a batch of their own."""
    first = batch.query_starts[begin]
    return RaggedBatch(
        query_starts=[start - first for start in batch.query_starts[begin : end + 1]],
        context_lens=batch.context_lens[begin:end],
        block_tables=batch.block_tables[begin:end],
        num_decode=max(0, min(end, batch.num_decode) - begin),
        block_size=batch.block_size,
    )
