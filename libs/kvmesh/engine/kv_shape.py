"""Shape and dtype of a KV pool as a tensor. Tests: tests/unit/engine/test_kv_cache.py."""

from __future__ import annotations

import torch

from kvmesh.core.types import KvLayout

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

SPARE_BLOCKS = 1
"""Behind those that count: where rows of a static step that are nobody's write."""


def pool_shape(layout: KvLayout, num_blocks: int) -> tuple[int, ...]:
    """(num_blocks, layers, 2, block_size, kv_heads, head_dim)."""
    return (
        num_blocks,
        layout.num_layers,
        2,
        layout.block_size,
        layout.num_kv_heads,
        layout.head_dim,
    )
