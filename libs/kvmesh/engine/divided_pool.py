"""A KV pool whose blocks are divided into parts, as the ranks of one worker compute them.

Each part is in memory of a device, of this host or of another. To channels it is one pool in which
a block has the same bytes as on one device: they meet in memory of this host.
Tests: tests/unit/engine/test_divided_pool.py, tests/integration/test_unequal_ranks.py.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol

from torch import Tensor

from kvmesh.core.errors import LostError
from kvmesh.engine.device_driver import DeviceDriver
from kvmesh.engine.part_copies import PartCopies
from kvmesh.transfer.device import Moment, Pieces, pieces_of


class Copies(Protocol):
    """Copies between a part and memory of this host. Thread-safe."""

    def gather(self, pieces: Pieces, at: int, stride: int, after: Moment) -> None:
        """See `StagingMemory.gather`; pieces are those of the part's memory."""
        ...

    def scatter(self, pieces: Pieces, at: int, stride: int, after: Moment) -> None:
        """Copies into pieces of the part.

        Args:
            at, stride: as in `gather`.
        """
        ...

    def close(self) -> None:
        """Frees what was taken for them; no copy may be under way. May be called again."""
        ...


class BlocksPart(Protocol):
    """One part of every block: the parts of all blocks, one after the other.

    Attributes:
        runs: offset in a block and number of bytes of each range in the part, in the part's order.
    """

    @property
    def runs(self) -> Sequence[tuple[int, int]]:
        """See the attributes."""
        ...

    def copies(self, host: Tensor) -> Copies:
        """Prepares copies to and from memory of this host.

        Args:
            host: [bytes] uint8, pinned.

        Raises:
            LostError: the device failed.
        """
        ...

    def close(self) -> None:
        """Gives the memory back; no copy may be under way. May be called again."""
        ...


class DevicePart:
    """A part in memory of a device of this host."""

    def __init__(
        self,
        driver: DeviceDriver,
        memory: Tensor,
        runs: Sequence[tuple[int, int]],
        handle: bytes = b"",
    ) -> None:
        """Takes the memory.

        Args:
            memory: [bytes] uint8 on the device.
            runs: see `BlocksPart`.
            handle: by which the memory was opened; empty: it belongs to this process.
        """
        self.runs = runs
        self._driver = driver
        self._memory: Tensor | None = memory
        self._handle = handle

    def copies(self, host: Tensor) -> PartCopies:
        """See `BlocksPart.copies`."""
        assert self._memory is not None, "the part is closed"
        size = max(size for _, size in self.runs)
        return PartCopies(self._driver, self._memory, size, host)

    def close(self) -> None:
        """See `BlocksPart.close`."""
        self._memory = None  # its tensor would outlive the mapping
        if self._handle:
            self._driver.close(self._handle)
            self._handle = b""


class PartsStaging:
    """Staging memory of all parts of a pool (`transfer.device.StagingMemory`)."""

    def __init__(
        self,
        driver: DeviceDriver,
        parts: Sequence[BlocksPart],
        block_bytes: int,
        memory: memoryview,
    ) -> None:
        """Takes as much memory on each device.

        Args:
            driver: of the device whose steps end last; its device has the first part.

        Raises:
            LostError: as `DevicePool.staging`.
        """
        self._driver = driver
        self._block_bytes = block_bytes
        self._runs = [part.runs for part in parts]
        self._host: Tensor | None = driver.pin(memory)
        self._copies: list[Copies] = []
        # The calling thread copies the first part.
        self._threads = ThreadPoolExecutor(len(parts) - 1, "kv-part") if parts[1:] else None
        try:
            for part in parts:
                self._copies.append(part.copies(self._host))
        except LostError:
            self.close()
            raise

    def gather(self, pieces: Pieces, at: int, stride: int, after: Moment) -> None:
        """See `StagingMemory.gather`: all parts at once."""

        def gather(number: int, after: Moment) -> None:
            for offset, cut in cut_pieces(pieces, self._block_bytes, self._runs[number]):
                self._copies[number].gather(cut, at + offset, stride, after)

        self._on_all(gather, after)

    def scatter(self, at: int, pieces: Pieces, after: Moment) -> None:
        """See `StagingMemory.scatter`: all parts at once."""

        def scatter(number: int, after: Moment) -> None:
            for offset, cut in cut_pieces(pieces, self._block_bytes, self._runs[number]):
                self._copies[number].scatter(cut, at + offset, pieces.size, after)

        self._on_all(scatter, after)

    def close(self) -> None:
        """See `StagingMemory.close`."""
        for each in self._copies:
            each.close()
        self._copies.clear()
        if self._host is not None:
            self._driver.unpin(self._host)
            self._host = None
        if self._threads is not None:
            self._threads.shutdown()

    def _on_all(self, copy: Callable[[int, Moment], None], after: Moment) -> None:
        assert self._host is not None, "the staging memory is closed"
        if self._threads is None:
            copy(0, after)
            return
        # A step ends on this device when all ranks have given their part of its result.
        self._driver.run(lambda: None, after)
        others = [self._threads.submit(copy, n, None) for n in range(1, len(self._copies))]
        try:
            copy(0, None)
        finally:
            wait(others)
        for each in others:
            each.result()


class DividedPool:
    """The pool of all parts (`transfer.device.DevicePool`). Other processes cannot map it."""

    def __init__(
        self, block_bytes: int, num_blocks: int, driver: DeviceDriver, parts: Sequence[BlocksPart]
    ) -> None:
        """Takes the parts' memory.

        Args:
            block_bytes: bytes of a block, of all parts.
            driver: of the device whose steps end last; its device has the first part.
        """
        assert sum(size for part in parts for _, size in part.runs) == block_bytes, (
            "parts of the same blocks"
        )
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._parts = list(parts)
        self._driver = driver
        # Memory of `write_view` runs, until `written` copies it to the pool.
        self._arriving: dict[tuple[int, int], memoryview] = {}
        self.computed()

    @property
    def num_blocks(self) -> int:
        """See `DevicePool.num_blocks`."""
        return self._num_blocks

    def computed(self) -> None:
        """See `KvPool.computed`."""
        self._driver.mark()

    def moment(self) -> Moment:
        """See `DevicePool.moment`."""
        return self._driver.moment()

    def is_past(self, moment: Moment) -> bool:
        """See `DevicePool.is_past`."""
        return self._driver.is_past(moment)

    def staging(self, memory: memoryview) -> PartsStaging:
        """See `DevicePool.staging`."""
        return PartsStaging(self._driver, self._parts, self._block_bytes, memory)

    def read_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Returns a copy of the run as of all steps launched so far."""
        memory = self._host_memory(first_block, num_blocks)
        pieces = pieces_of([(first_block, num_blocks)], self._block_bytes, None)
        staging = self.staging(memory)
        staging.gather(pieces, 0, self._block_bytes, self.moment())
        staging.close()
        return memory

    def write_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Returns memory for the run; the pool does not change before `written`."""
        memory = self._host_memory(first_block, num_blocks)
        self._arriving[first_block, num_blocks] = memory
        return memory

    def written(self, first_block: int, num_blocks: int) -> None:
        """Copies a filled `write_view` of exactly this run into the pool."""
        pieces = pieces_of([(first_block, num_blocks)], self._block_bytes, None)
        staging = self.staging(self._arriving.pop((first_block, num_blocks)))
        staging.scatter(0, pieces, self.moment())
        staging.close()

    def close(self) -> None:
        """See `KvPool.close`. The holders of staging memory close it themselves."""
        self._arriving.clear()
        while self._parts:
            self._parts.pop().close()

    def _host_memory(self, first_block: int, num_blocks: int) -> memoryview:
        assert 0 <= first_block <= first_block + num_blocks <= self._num_blocks
        return memoryview(mmap.mmap(-1, num_blocks * self._block_bytes))


def cut_pieces(
    pieces: Pieces, block_bytes: int, runs: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, Pieces]]:
    """Yields where pieces of whole blocks lie in a part, by ranges that the part has.

    Args:
        pieces: blocks of `block_bytes`, or the same part of each.
        runs: of the part: see `BlocksPart`.

    Yields:
        The offset of the range in each piece, and the range of all pieces in the part's memory.
    """
    blocks, first = pieces.starts // block_bytes, int(pieces.starts[0]) % block_bytes
    part_bytes = sum(size for _, size in runs)
    end, local = first + pieces.size, 0
    for offset, size in runs:
        low, high = max(offset, first), min(offset + size, end)
        if low < high:
            starts = blocks * part_bytes + local + low - offset
            yield low - first, Pieces(starts, high - low)
        local += size
