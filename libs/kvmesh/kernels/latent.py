"""Attention over latents (MLA): one compressed vector per position, shared by all heads.

`kv` is the pool seen as `[num_blocks, layers, block_size, width]`; a position's vector is the
latent, then the rotated key. Tests: tests/unit/kernels/test_latent.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.kernels import host, host_latent
from kvmesh.kernels.plan import RaggedBatch, decode_buckets, padded_tables, slots_of
from kvmesh.kernels.upload import sent


def latent_decode_attention(
    q: Tensor, kv: Tensor, layer: int, tables: Tensor, lens: Tensor, *, scale: float, rank: int
) -> Tensor:
    """Computes attention of one query per sequence, all heads over the same vectors.

    Args:
        q: [sequences, heads, width], absorbed: it is multiplied with latents, not keys.
        tables: [sequences, longest] int64 block ids; padding may be any block.
        lens: [sequences] int64 positions.
        rank: number of leading values of a vector that are the latent.

    Returns:
        [sequences, heads, rank], weighted sums of latents.

    Source: DeepSeek-V2, arXiv 2405.04434 §2.1.2.
    """
    _, layers, size, width = kv.shape
    blocks = kv.view(-1, size * width)
    vectors = functional.embedding(tables * layers + layer, blocks).view(len(q), -1, width)
    hidden = torch.arange(vectors.shape[1], device=q.device) >= lens[:, None]
    # The tail of the last block may hold NaN, and 0 * NaN is NaN: the mask alone is not enough.
    vectors.masked_fill_(hidden[..., None], 0)
    scores = (q @ vectors.transpose(1, 2)).float() * scale
    scores.masked_fill_(hidden[:, None], -torch.inf)
    return torch.softmax(scores, dim=-1).to(q.dtype) @ vectors[..., :rank]


def decode_on_cpu(
    q: Tensor, kv: Tensor, layer: int, tables: Tensor, lens: Tensor, *, scale: float, rank: int
) -> Tensor:
    """Computes `latent_decode_attention` by `latent.h` if it can, else by the twin."""
    library = host_latent.has_latent(kv, rank)
    attend = host_latent.latent_decode_attention if library else latent_decode_attention
    return attend(q, kv, layer, tables, lens, scale=scale, rank=rank)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Computes attention of the last positions of a context over all of it.

    Args:
        q: [queries, heads, key_dim].
        k: [context, heads, key_dim].
        v: [context, heads, value_dim].

    Returns:
        [queries, heads, value_dim].
    """
    dim = host.prefill_head_dim(q, max(k.shape[-1], v.shape[-1]))
    if dim is not None:
        return _host_causal(q, k, v, scale, dim)
    # Torch's attention materialises all scores if values are shorter than keys.
    padded = functional.pad(v, (0, max(0, k.shape[-1] - v.shape[-1])))
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, padded))
    mask = None
    if len(q) < len(k):
        mask = torch.full((len(q), len(k)), -torch.inf, dtype=q.dtype, device=q.device)
        mask.triu_(len(k) - len(q) + 1)
    out = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out[0].transpose(0, 1)[..., : v.shape[-1]]


def _host_causal(q: Tensor, k: Tensor, v: Tensor, scale: float, dim: int) -> Tensor:
    """Variant of `causal_attention` by the library, with the context as one block of a pool."""
    kv = k.new_empty(1, 1, 2, *k.shape[:2], dim)
    for part, values in zip(kv[0, 0], (k, v), strict=True):
        width = values.shape[-1]
        part[..., :width], part[..., width:] = values, 0
    out = host.prefill_attention(
        functional.pad(q, (0, dim - q.shape[-1])).contiguous(),
        kv,
        0,
        torch.zeros(1, 1, dtype=torch.int64),
        torch.tensor([0, len(q)]),
        torch.tensor([len(k)]),
        scale=scale,
        window=0,
        sinks=None,
    )
    return out[..., : v.shape[-1]]


class LatentMemory(Protocol):
    """The latents of one step."""

    num_decode: int
    """Number of leading rows that are the only token of their sequence."""

    def write(self, vectors: Tensor, layer: int) -> None:
        """Writes the rows' vectors, [rows, width], to their slots."""
        ...

    def decode(self, q: Tensor, layer: int, *, scale: float, rank: int) -> Tensor:
        """See `latent_decode_attention`; `q` has the decode rows."""
        ...

    def chunks(self, layer: int) -> Iterator[tuple[slice, Tensor]]:
        """Yields the rows of each prefill chunk, and its context's vectors [positions, width]."""
        ...


class StepLatent:
    """Latent attention of one step, planned once and run per layer.

    Args:
        kv: see the module docstring; changed in place.
        after_write: called in each layer after `write`.
    """

    def __init__(
        self, batch: RaggedBatch, kv: Tensor, after_write: Callable[[int], None] | None = None
    ) -> None:
        self._after_write = after_write
        self._batch = batch
        self._kv = kv
        self.num_decode = batch.num_decode
        slots = slots_of(batch)
        blocks, offsets = slots // batch.block_size, slots % batch.block_size
        rows = blocks * kv.shape[1] * batch.block_size + offsets
        # All indexes are made here: within a layer, a host copy would wait for the layers before.
        self._rows = sent(rows, torch.int64, kv.device)
        cut = batch.num_decode
        counts = [len(table) for table in batch.block_tables[:cut]]
        self._buckets = [
            (
                slice(run.start, run.stop),
                sent(
                    padded_tables(batch.block_tables[run.start : run.stop]), torch.int64, kv.device
                ),
                sent(batch.context_lens[run.start : run.stop], torch.int64, kv.device),
            )
            for run in decode_buckets(counts)
        ]
        self._chunk_tables = [
            sent(table, torch.int64, kv.device) for table in batch.block_tables[cut:]
        ]

    def write(self, vectors: Tensor, layer: int) -> None:
        """See `LatentMemory.write`."""
        size, width = self._kv.shape[2:]
        self._kv.view(-1, width).index_copy_(0, self._rows + layer * size, vectors)
        if self._after_write is not None:
            self._after_write(layer)

    def decode(self, q: Tensor, layer: int, *, scale: float, rank: int) -> Tensor:
        """See `LatentMemory.decode`."""
        attend = decode_on_cpu
        if self._kv.is_cuda:
            # Triton takes half a second to import and is needed only with a device.
            from kvmesh.kernels import latent_attention  # noqa: PLC0415

            attend = latent_attention.latent_decode_attention
        parts = [
            attend(q[run], self._kv, layer, tables, lens, scale=scale, rank=rank)
            for run, tables, lens in self._buckets
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def chunks(self, layer: int) -> Iterator[tuple[slice, Tensor]]:
        """See `LatentMemory.chunks`."""
        batch = self._batch
        for index in range(batch.num_decode, batch.num_sequences):
            table = self._chunk_tables[index - batch.num_decode]
            vectors = self._kv[table, layer].flatten(0, 1)[: batch.context_lens[index]]
            yield slice(batch.query_starts[index], batch.query_starts[index + 1]), vectors
