"""Host memory for blocks that left the pool, which may be on any device.

Tests: tests/unit/engine/test_host_arena.py.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import islice

from kvmesh.engine.protocol import KvMemory
from kvmesh.engine.staged_blocks import StagedBlocks
from kvmesh.kv.runs import consecutive_runs
from kvmesh.transfer.device import DevicePool
from kvmesh.transfer.memory import copy_views, with_huge_pages

_COPY_BYTES = 32 << 20


def _private_memory(num_bytes: int) -> mmap.mmap:
    # Of this process alone: shared memory gets huge pages only where the host allows it. The first
    # write to 32 MiB takes 5 ms in huge pages, 22 ms in small ones.
    return with_huge_pages(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class HostArena:
    """A fixed number of places, each of a block's size.

    Args:
        memory: the pool.
        block_bytes: bytes of its blocks.
        num_places: number of places; a place takes memory when it is first written.
        copy_bytes: maximum bytes of one copy, at least a block. A pool on a device takes as much
            pinned memory and device memory, and its steps wait for each copy.

    Raises:
        LostError: the pool's device has no such memory. It is taken here, since the device would
            be full at the first copy, when sequences run.
    """

    def __init__(
        self,
        memory: KvMemory,
        block_bytes: int,
        num_places: int,
        copy_bytes: int = _COPY_BYTES,
    ) -> None:
        assert num_places > 0, "an arena has a place"
        self._memory = memory
        self.block_bytes = block_bytes
        self.num_places = num_places
        self._copy_blocks = min(max(1, copy_bytes // block_bytes), num_places)
        self._bytes = memoryview(_private_memory(num_places * block_bytes))
        self._free = list(range(num_places))
        # Staging memory for blocks of a device pool; None for pools in host memory.
        self._staged: StagedBlocks | None = None
        if isinstance(memory, DevicePool):
            self._staged = StagedBlocks(memory, block_bytes, self._copy_blocks)

    @property
    def num_free(self) -> int:
        """Number of free places."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes places, no more than `num_free`."""
        assert count <= len(self._free), "the arena is full"
        return [self._free.pop() for _ in range(count)]

    def store(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        """Copies blocks of the pool to places; in any thread, one call at a time.

        Raises:
            LostError: the pool's device failed.
        """
        taken = iter(places)
        if self._staged is not None:
            for count, view in self._staged.read(blocks):
                copy_views(self._places(taken, count), [view])
            return
        for first, count in self._pieces(blocks):
            copy_views(self._places(taken, count), [self._memory.read_view(first, count)])

    def load(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Copies places into blocks of the pool; in any thread, one call at a time.

        The places stay taken.

        Raises:
            LostError: as `store`.
        """
        wanted = iter(places)
        if self._staged is not None:
            self._staged.write(
                blocks, lambda count, view: copy_views([view], self._places(wanted, count))
            )
            return
        for first, count in self._pieces(blocks):
            view = self._memory.write_view(first, count)
            copy_views([view], self._places(wanted, count))
            self._memory.written(first, count)

    def views(self, places: Sequence[int]) -> list[memoryview]:
        """Returns the memory of places."""
        return self._places(iter(places), len(places))

    def free(self, places: Sequence[int]) -> None:
        """Gives places back."""
        self._free += places

    def close(self) -> None:
        """Frees pinned memory; no copy may follow. May be called again."""
        if self._staged is not None:
            self._staged.close()

    def _pieces(self, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields (first, count) runs of blocks, none longer than one copy."""
        most = self._copy_blocks
        for first, count in consecutive_runs(blocks):
            for done in range(0, count, most):
                yield first + done, min(most, count - done)

    def _places(self, places: Iterator[int], count: int) -> list[memoryview]:
        size = self.block_bytes
        return [self._bytes[place * size : (place + 1) * size] for place in islice(places, count)]
