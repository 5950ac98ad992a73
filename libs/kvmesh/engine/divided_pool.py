"""A KV pool whose blocks are divided among several devices, as ranks of one worker compute them.

Each device has one part of every block. To channels it is one pool in which a block has the same
bytes as on one device: they meet in host memory that all devices access.
Tests: tests/unit/engine/test_divided_pool.py, tests/integration/test_unequal_ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmesh.core.errors import LostError
from kvmesh.engine.device_driver import DeviceDriver
from kvmesh.engine.device_pool import PartCopies
from kvmesh.transfer.device import Moment, Pieces


@dataclass(frozen=True, slots=True)
class DevicePart:
    """One device's part of every block.

    Attributes:
        memory: [bytes] uint8 on the device: the parts of all blocks, one after the other.
        runs: offset in a block and number of bytes of each range in the part, in the part's order.
        handle: by which the memory was opened; empty: it belongs to this process.
    """

    driver: DeviceDriver
    memory: Tensor
    runs: Sequence[tuple[int, int]]
    handle: bytes = b""

    @property
    def block_bytes(self) -> int:
        """Bytes of the part of one block."""
        return sum(size for _, size in self.runs)


class DividedStaging:
    """Staging memory of all devices (`transfer.device.StagingMemory`)."""

    def __init__(self, parts: Sequence[DevicePart], block_bytes: int, memory: memoryview) -> None:
        """Takes as much memory on each device.

        Raises:
            LostError: as `DevicePool.staging`.
        """
        self._parts = parts
        self._block_bytes = block_bytes
        self._leader = parts[0].driver
        self._host: Tensor | None = self._leader.pin(memory)
        self._copies: list[PartCopies] = []
        self._threads = ThreadPoolExecutor(len(parts), "kv-part")
        try:
            for part in parts:
                size = max(size for _, size in part.runs)
                self._copies.append(PartCopies(part.driver, part.memory, size, self._host))
        except LostError:
            self.close()
            raise

    def gather(self, pieces: Pieces, at: int, stride: int, after: Moment) -> None:
        """See `StagingMemory.gather`: all devices at once."""

        def gather(number: int) -> None:
            for offset, cut in cut_pieces(pieces, self._block_bytes, self._parts[number]):
                self._copies[number].gather(cut, at + offset, stride, None)

        self._on_all(gather, after)

    def scatter(self, at: int, pieces: Pieces, after: Moment) -> None:
        """See `StagingMemory.scatter`: all devices at once."""

        def scatter(number: int) -> None:
            for offset, cut in cut_pieces(pieces, self._block_bytes, self._parts[number]):
                self._copies[number].scatter(cut, at + offset, pieces.size, None)

        self._on_all(scatter, after)

    def close(self) -> None:
        """See `StagingMemory.close`."""
        for each in self._copies:
            each.close()
        self._copies.clear()
        if self._host is not None:
            self._leader.unpin(self._host)
            self._host = None
        self._threads.shutdown()

    def _on_all(self, copy: Callable[[int], None], after: Moment) -> None:
        assert self._host is not None, "the staging memory is closed"
        # A step ends on the leader's device when all ranks have given their part of its result.
        self._leader.run(lambda: None, after)
        for _ in self._threads.map(copy, range(len(self._parts))):
            pass


class DividedPool:
    """The pool of all parts (`transfer.device.DevicePool`). Other processes cannot map it."""

    def __init__(self, block_bytes: int, num_blocks: int, parts: Sequence[DevicePart]) -> None:
        """Takes the parts' memory.

        Args:
            block_bytes: bytes of a block, of all parts.
            parts: the first one is of the device whose steps end last.
        """
        assert sum(part.block_bytes for part in parts) == block_bytes, "parts of the same blocks"
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._parts = list(parts)
        self._leader = parts[0].driver
        # Memory of `write_view` runs, until `written` copies it to the pool.
        self._arriving: dict[tuple[int, int], Tensor] = {}
        self.computed()

    @property
    def num_blocks(self) -> int:
        """See `DevicePool.num_blocks`."""
        return self._num_blocks

    def computed(self) -> None:
        """See `KvPool.computed`."""
        self._leader.mark()

    def moment(self) -> Moment:
        """See `DevicePool.moment`."""
        return self._leader.moment()

    def is_past(self, moment: Moment) -> bool:
        """See `DevicePool.is_past`."""
        return self._leader.is_past(moment)

    def staging(self, memory: memoryview) -> DividedStaging:
        """See `DevicePool.staging`."""
        return DividedStaging(self._parts, self._block_bytes, memory)

    def read_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Returns a copy of the run as of all steps launched so far."""
        staged = self._host_memory(first_block, num_blocks)
        for on_device, on_host in self._ranges(first_block, staged):
            on_host.copy_(on_device)
        view: memoryview = staged.view(-1).numpy().data
        return view

    def write_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Returns memory for the run; the pool does not change before `written`."""
        staged = self._host_memory(first_block, num_blocks)
        self._arriving[first_block, num_blocks] = staged
        view: memoryview = staged.view(-1).numpy().data
        return view

    def written(self, first_block: int, num_blocks: int) -> None:
        """Copies a filled `write_view` of exactly this run into the pool."""
        staged = self._arriving.pop((first_block, num_blocks))
        for on_device, on_host in self._ranges(first_block, staged):
            on_device.copy_(on_host)

    def close(self) -> None:
        """See `KvPool.close`. The holders of staging memory close it themselves."""
        self._arriving.clear()
        while self._parts:
            driver, handle = self._parts[-1].driver, self._parts[-1].handle
            self._parts.pop()  # with its tensor, which would outlive the mapping
            if handle:
                driver.close(handle)

    def _host_memory(self, first_block: int, num_blocks: int) -> Tensor:
        assert 0 <= first_block <= first_block + num_blocks <= self._num_blocks
        return torch.empty((num_blocks, self._block_bytes), dtype=torch.uint8)

    def _ranges(self, first_block: int, staged: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of the same bytes of some blocks: on a device, and in `staged`."""
        self._leader.run(lambda: None, self.moment())
        for part in self._parts:
            blocks = part.memory.view(-1, part.block_bytes)
            local = 0
            for offset, size in part.runs:
                on_device = blocks[first_block : first_block + len(staged), local : local + size]
                yield on_device, staged[:, offset : offset + size]
                local += size


def cut_pieces(pieces: Pieces, block_bytes: int, part: DevicePart) -> Iterator[tuple[int, Pieces]]:
    """Yields where pieces of whole blocks lie on a device, by ranges that the device has.

    Args:
        pieces: blocks of `block_bytes`, or the same part of each.

    Yields:
        The offset of the range in each piece, and the range of all pieces in the device's memory.
    """
    blocks, first = pieces.starts // block_bytes, int(pieces.starts[0]) % block_bytes
    end, local = first + pieces.size, 0
    for offset, size in part.runs:
        low, high = max(offset, first), min(offset + size, end)
        if low < high:
            starts = blocks * part.block_bytes + local + low - offset
            yield low - first, Pieces(starts, high - low)
        local += size
