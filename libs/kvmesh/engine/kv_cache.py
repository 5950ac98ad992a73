"""The KV pool as one tensor, and byte access to its blocks for the data channel.

On the host the pool is a memfd, so that blocks are sent and received without a copy and can be
handed to another process. Tests: tests/unit/engine/test_kv_cache.py.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

from kvmesh.core.types import KvLayout
from kvmesh.transfer.memory import create_shared

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


_SPARE_BLOCKS = 1
"""Behind those that count: where rows of a static step that are nobody's write."""


class KvPool(Protocol):
    """`KvMemory` together with the tensor that the model computes on."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        ...

    @property
    def tensor(self) -> Tensor:
        """[num_blocks, layers, 2, block_size, kv_heads, head_dim], contiguous."""
        ...

    @property
    def with_spare(self) -> Tensor:
        """`tensor` and one block more, which nobody is given."""
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

    def close(self) -> None:
        """Frees memory once no view is left. May be called again."""
        ...


def _shape(layout: KvLayout, num_blocks: int) -> tuple[int, ...]:
    return (
        num_blocks,
        layout.num_layers,
        2,
        layout.block_size,
        layout.num_kv_heads,
        layout.head_dim,
    )


def _bytes_of(staged: Tensor) -> memoryview:
    view: memoryview = staged.numpy().data
    return view


class HostKvPool:
    """A pool in host memory. Views are the memory itself.

    Attributes:
        fd: the memfd, for a process on the same host to map.
    """

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        assert num_blocks > 0, "a pool needs a block"
        self._num_blocks = num_blocks
        self._block_bytes = layout.block_bytes
        size = (num_blocks + _SPARE_BLOCKS) * layout.block_bytes
        self.fd, memory = create_shared("kvmesh-kv", size)
        self._bytes: memoryview | None = memoryview(memory)
        self._tensor: Tensor | None = torch.frombuffer(
            memory, dtype=TORCH_DTYPES[layout.dtype]
        ).view(_shape(layout, num_blocks + _SPARE_BLOCKS))

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

    def read_view(self, first_block: int, num_blocks: int) -> memoryview:
        """The run's memory."""
        assert self._bytes is not None, "the pool is closed"
        assert 0 <= first_block <= first_block + num_blocks <= self._num_blocks
        size = self._block_bytes
        return self._bytes[first_block * size : (first_block + num_blocks) * size]

    def write_view(self, first_block: int, num_blocks: int) -> memoryview:
        """The run's memory."""
        return self.read_view(first_block, num_blocks)

    def written(self, first_block: int, num_blocks: int) -> None:
        """Nothing to do: the bytes lie where the model reads them."""

    def close(self) -> None:
        """See `KvPool.close`. The mapping goes with its last view."""
        if self._bytes is None:
            return
        self._bytes = None
        self._tensor = None
        os.close(self.fd)


class DeviceKvPool:
    """A pool in CUDA memory. Views are pinned host copies."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: str) -> None:
        assert num_blocks > 0, "a pool needs a block"
        self._num_blocks = num_blocks
        self._tensor: Tensor | None = torch.zeros(
            _shape(layout, num_blocks + _SPARE_BLOCKS),
            dtype=TORCH_DTYPES[layout.dtype],
            device=device,
        )
        # Runs that are being received, until `written` copies them over.
        self._arriving: dict[tuple[int, int], Tensor] = {}

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

    def read_view(self, first_block: int, num_blocks: int) -> memoryview:
        """A copy of the run as it is after all steps launched so far."""
        run = self._run(first_block, num_blocks)
        staged = torch.empty(run.shape, dtype=torch.uint8, pin_memory=True)
        staged.copy_(run)
        return _bytes_of(staged)

    def write_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Staging memory for the run; the pool does not change before `written`."""
        run = self._run(first_block, num_blocks)
        staged = torch.empty(run.shape, dtype=torch.uint8, pin_memory=True)
        self._arriving[first_block, num_blocks] = staged
        return _bytes_of(staged)

    def written(self, first_block: int, num_blocks: int) -> None:
        """Copies a filled `write_view` of exactly this run into the pool."""
        self._run(first_block, num_blocks).copy_(self._arriving.pop((first_block, num_blocks)))

    def close(self) -> None:
        """See `KvPool.close`."""
        self._tensor = None
        self._arriving.clear()

    def _run(self, first_block: int, num_blocks: int) -> Tensor:
        assert 0 <= first_block <= first_block + num_blocks <= self._num_blocks
        return self.tensor[first_block : first_block + num_blocks].view(torch.uint8).view(-1)


def allocate_pool(layout: KvLayout, num_blocks: int, device: str) -> KvPool:
    """An empty pool on the device."""
    if device == "cpu":
        return HostKvPool(layout, num_blocks)
    return DeviceKvPool(layout, num_blocks, device)
