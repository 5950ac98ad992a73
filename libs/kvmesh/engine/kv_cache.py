"""The KV pool as one tensor, and byte access to its blocks for the data channel.

On the host the pool is a memfd, so blocks are sent and received without a copy, and another process
can map it. Tests: tests/unit/engine/test_kv_cache.py.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

import torch
from torch import Tensor

from kvmesh.core.types import KvLayout
from kvmesh.engine.device_driver import CudaDriver
from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.engine.kv_shape import SPARE_BLOCKS, TORCH_DTYPES, PoolTensor
from kvmesh.transfer.memory import create_shared

__all__ = ["TORCH_DTYPES", "HostKvPool", "KvPool", "allocate_pool"]


class KvPool(Protocol):
    """`KvMemory` together with the tensor that the model computes on."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        ...

    @property
    def tensor(self) -> Tensor:
        """[num_blocks, layers, 2, block_size, kv_heads, head_dim], contiguous."""
        ...

    @property
    def with_spare(self) -> Tensor:
        """`tensor` plus one block that is never allocated."""
        ...

    def read_view(self, first_block: int, num_blocks: int) -> memoryview:
        """See `KvMemory.read_view`."""
        ...

    def write_view(self, first_block: int, num_blocks: int) -> memoryview:
        """See `KvMemory.write_view`."""
        ...

    def written(self, first_block: int, num_blocks: int) -> None:
        """See `KvMemory.written`."""
        ...

    def computed(self) -> None:
        """Records that a step's writes were launched; readers in other queues wait for them.

        Called in the launching thread.
        """
        ...

    def close(self) -> None:
        """Frees memory once no view is left. May be called again."""
        ...


class HostKvPool(PoolTensor):
    """A pool in host memory. Views are the memory itself.

    Attributes:
        fd: the memfd, for a process on the same host to map.
    """

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        assert num_blocks > 0, "a pool needs a block"
        self._block_bytes = layout.block_bytes
        size = (num_blocks + SPARE_BLOCKS) * layout.block_bytes
        self.fd, memory = create_shared("kvmesh-kv", size)
        # A pool that is dropped without `close` keeps no descriptor either.
        self._close_fd = weakref.finalize(self, os.close, self.fd)
        self._bytes: memoryview | None = memoryview(memory)
        flat = torch.frombuffer(memory, dtype=TORCH_DTYPES[layout.dtype])
        super().__init__(layout, num_blocks, flat)

    def read_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Returns the run's memory."""
        assert self._bytes is not None, "the pool is closed"
        assert 0 <= first_block <= first_block + num_blocks <= self._num_blocks
        size = self._block_bytes
        return self._bytes[first_block * size : (first_block + num_blocks) * size]

    def write_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Returns the run's memory."""
        return self.read_view(first_block, num_blocks)

    def written(self, first_block: int, num_blocks: int) -> None:
        """Does nothing: the model reads the same bytes."""

    def computed(self) -> None:
        """Does nothing: a step on the host has written when it returns."""

    def close(self) -> None:
        """See `KvPool.close`. The memory is freed with its last view."""
        if self._bytes is None:
            return
        self._bytes = None
        self._tensor = None
        self._close_fd()


def allocate_pool(layout: KvLayout, num_blocks: int, device: str) -> KvPool:
    """Allocates an empty pool on the device."""
    if device == "cpu":
        return HostKvPool(layout, num_blocks)
    return DeviceKvPool(layout, num_blocks, CudaDriver(device))
