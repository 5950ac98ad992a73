"""Copies scattered blocks of a device pool in batches: one kernel and one transfer per batch.

Tests: tests/unit/engine/test_staged_blocks.py.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence

from kvmesh.transfer.device import DevicePool, pieces_of


class StagedBlocks:
    """Staging memory shared by host and device, for one thread at a time."""

    def __init__(self, pool: DevicePool, block_bytes: int, num_blocks: int) -> None:
        """Takes pinned memory, and as much on the device.

        Args:
            num_blocks: number of blocks of one copy.

        Raises:
            LostError: the device refuses.
        """
        self._pool = pool
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._memory = memoryview(mmap.mmap(-1, num_blocks * block_bytes))
        self._staging = pool.staging(self._memory)

    def read(self, blocks: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
        """Yields the count of the next blocks and their bytes, valid until the next iteration.

        Raises:
            LostError: the device failed.
        """
        for batch, view in self._batches(blocks):
            pieces = pieces_of([(block, 1) for block in batch], self._block_bytes, None)
            self._staging.gather(pieces, 0, pieces.size, self._pool.moment())
            yield len(batch), view

    def write(self, blocks: Sequence[int], fill: Callable[[int, memoryview], None]) -> None:
        """Copies into blocks of the pool; steps launched later see them.

        Args:
            fill: writes the bytes of the next `count` blocks into memory.

        Raises:
            LostError: the device failed.
        """
        for batch, view in self._batches(blocks):
            fill(len(batch), view)
            pieces = pieces_of([(block, 1) for block in batch], self._block_bytes, None)
            self._staging.scatter(0, pieces, self._pool.moment())

    def close(self) -> None:
        """Frees the memory; no copy may be under way. May be called again."""
        self._staging.close()

    def _batches(self, blocks: Sequence[int]) -> Iterator[tuple[Sequence[int], memoryview]]:
        for first in range(0, len(blocks), self._num_blocks):
            batch = blocks[first : first + self._num_blocks]
            yield batch, self._memory[: len(batch) * self._block_bytes]
