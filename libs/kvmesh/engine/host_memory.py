"""KV blocks in host memory as bytes, which other processes of the host can map. Torch-free.

Tests: tests/unit/engine/test_host_memory.py, tests/contract/test_runner_contract.py.
"""

from __future__ import annotations

import os
import weakref

from kvmesh.transfer.memory import create_shared


class HostMemory:
    """KV blocks in a memfd.

    Args:
        num_spare: number of blocks at the end that are never allocated.

    Attributes:
        fd: the memfd, for a process on the same host to map.
        view: the whole memory.
    """

    def __init__(self, num_blocks: int, block_bytes: int, num_spare: int = 0) -> None:
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        size = (num_blocks + num_spare) * block_bytes
        self.fd, mapping = create_shared("kvmesh-kv", size)
        self.view = memoryview(mapping)
        self._close_fd = weakref.finalize(self, os.close, self.fd)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        return self._num_blocks

    def read_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Returns the bytes of a run of blocks."""
        start = first_block * self._block_bytes
        return self.view[start : start + num_blocks * self._block_bytes]

    def write_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Returns the writable bytes of a run of blocks."""
        return self.read_view(first_block, num_blocks)

    def written(self, first_block: int, num_blocks: int) -> None:
        """Does nothing: the view is the memory itself."""

    def computed(self) -> None:
        """Does nothing: a step on the host has written when it returns."""

    def close(self) -> None:
        """Closes the memfd against further mappings; the last view frees the memory."""
        self._close_fd()
