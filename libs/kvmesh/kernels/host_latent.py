"""`latent.h` on torch tensors: decode attention over latents, read in place.

The twin is `latent.latent_decode_attention`. Tests: tests/unit/kernels/test_latent.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvmesh.kernels import host

_VECTOR = 16


def has_latent(kv: Tensor, rank: int) -> bool:
    """Returns whether the library supports attention over this pool."""
    return rank % _VECTOR == 0 and host.has_vectors(kv)


def latent_decode_attention(
    q: Tensor, kv: Tensor, layer: int, tables: Tensor, lens: Tensor, *, scale: float, rank: int
) -> Tensor:
    """See `latent.latent_decode_attention`; every length is at least 1."""
    q, tables, lens = q.contiguous(), tables.long().contiguous(), lens.long().contiguous()
    out = q.new_empty(*q.shape[:2], rank)
    host.function_of("latent_decode", q.dtype)(
        q.data_ptr(),
        kv.data_ptr() + layer * kv.stride(1) * kv.element_size(),
        out.data_ptr(),
        tables.data_ptr(),
        lens.data_ptr(),
        tables.shape[1],
        *q.shape,
        rank,
        kv.stride(0),
        kv.shape[2],
        scale,
        torch.get_num_threads(),
    )
    return out
