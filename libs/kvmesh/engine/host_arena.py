"""Host memory for blocks that left the pool. Works on any pool, whatever device it is on.

Tests: tests/unit/engine/test_host_arena.py.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import islice

from kvmesh.engine.protocol import KvMemory
from kvmesh.kv.runs import consecutive_runs
from kvmesh.transfer.memory import copy_views

_COPY_BYTES = 32 << 20


class HostArena:
    """A fixed number of places, each of a block's size.

    Args:
        memory: the pool.
        block_bytes: of its blocks.
        num_places: room for so many; the memory itself is taken when a place is first written.
        copy_bytes: most that is copied at once, a block at least. A pool on a device takes as much
            pinned memory for each, and its steps wait behind it.
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
        self._copy_blocks = max(1, copy_bytes // block_bytes)
        self._bytes = memoryview(mmap.mmap(-1, num_places * block_bytes))
        self._free = list(range(num_places))

    @property
    def num_free(self) -> int:
        """Places that `store` can take."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes places, no more than `num_free`."""
        assert count <= len(self._free), "the arena is full"
        return [self._free.pop() for _ in range(count)]

    def store(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        """Copies blocks of the pool to places; may be called in any thread."""
        taken = iter(places)
        for first, count in self._pieces(blocks):
            copy_views(self._places(taken, count), [self._memory.read_view(first, count)])

    def load(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Copies places into blocks of the pool; may be called in any thread.

        The places stay taken.
        """
        wanted = iter(places)
        for first, count in self._pieces(blocks):
            view = self._memory.write_view(first, count)
            copy_views([view], self._places(wanted, count))
            self._memory.written(first, count)

    def free(self, places: Sequence[int]) -> None:
        """Gives places back."""
        self._free += places

    def _pieces(self, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Runs of blocks, first and count, none longer than is copied at once."""
        most = self._copy_blocks
        for first, count in consecutive_runs(blocks):
            for done in range(0, count, most):
                yield first + done, min(most, count - done)

    def _places(self, places: Iterator[int], count: int) -> list[memoryview]:
        size = self.block_bytes
        return [self._bytes[place * size : (place + 1) * size] for place in islice(places, count)]
