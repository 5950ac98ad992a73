"""Shape and dtype of a KV pool as a tensor. Tests: tests/unit/engine/test_kv_cache.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kvmesh.core.types import KvLayout
from kvmesh.engine.config import HeadShape

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

SPARE_BLOCKS = 1
"""Number of blocks after the pool's own.

Padding rows of a static step write to them, and vLLM keeps one for itself.
"""


def pool_shape(layout: KvLayout, num_blocks: int) -> tuple[int, ...]:
    """Returns (num_blocks, layers, 2, block_size, kv_heads, head_dim)."""
    return (
        num_blocks,
        layout.num_layers,
        2,
        layout.block_size,
        layout.num_kv_heads,
        layout.head_dim,
    )


def group_view(kv: Tensor, heads: HeadShape) -> Tensor:
    """Returns the view of a pool for a token group with these heads; copies nothing."""
    return kv.view(len(kv), -1, 2, kv.shape[3], heads.num_kv_heads, heads.head_dim)


class PoolTensor:
    """A pool's memory as the tensor that the model computes on, until it is closed."""

    def __init__(self, layout: KvLayout, num_blocks: int, memory: Tensor) -> None:
        """`memory` is flat, of the layout's dtype, and includes the spare blocks."""
        self._num_blocks = num_blocks
        shape = pool_shape(layout, num_blocks + SPARE_BLOCKS)
        self._tensor: Tensor | None = memory.view(shape)

    @property
    def num_blocks(self) -> int:
        """See `KvPool.num_blocks`."""
        return self._num_blocks

    @property
    def tensor(self) -> Tensor:
        """See `KvPool.tensor`."""
        return self.with_spare[: self._num_blocks]

    @property
    def with_spare(self) -> Tensor:
        """See `KvPool.with_spare`."""
        assert self._tensor is not None, "the pool is closed"
        return self._tensor
