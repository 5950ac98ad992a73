"""A model's attention over blocks of its pool, for queries of other workers (TokenLake §3.3).

Tests: tests/integration/test_remote_prefix.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvmesh.core.kv_groups import KvGroups
from kvmesh.engine.attention import SelfAttention
from kvmesh.engine.kv_cache import KvPool
from kvmesh.engine.model import DecoderModel
from kvmesh.kernels.partial import Part, bytes_of


def can_be_parted(model: DecoderModel, groups: KvGroups) -> bool:
    """Returns whether the model's attention can be computed per part of the context and merged.

    True for full attention over keys and values. False if a window depends on positions, a sink
    belongs to the whole context, scores are soft-capped, or another mixer replaces attention.
    """
    return groups == KvGroups() and all(
        isinstance(mixer, SelfAttention) and mixer.spec.sinks is None and not mixer.spec.cap
        for mixer in (getattr(layer, "mixer", None) for layer in model.layers)
    )


class PoolAttention:
    """`PartialAttention` over a runner's pool."""

    def __init__(self, pool: KvPool, num_heads: int) -> None:
        self._pool = pool
        self.num_heads = num_heads

    @torch.inference_mode()
    def attend(
        self, layer: int, blocks: Sequence[int], queries: memoryview, scale: float
    ) -> tuple[memoryview, memoryview]:
        """See `PartialAttention.attend`."""
        kv = self._pool.tensor
        q = torch.frombuffer(queries, dtype=kv.dtype).view(-1, self.num_heads, kv.shape[5])
        part = Part(kv, blocks, len(blocks) * kv.shape[3])
        out, lse = part.attend(q.to(kv.device), layer, scale)
        return bytes_of(out), bytes_of(lse)
