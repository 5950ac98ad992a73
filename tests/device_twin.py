"""A device in host memory: what `CudaDriver` does, without CUDA.

Pools on it are the product's `DeviceKvPool`, whose bytes channels reach through kernels' twins and
staging memory alone; what is not copied properly does not arrive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from kvmesh.core.errors import LostError
from kvmesh.core.types import KvLayout
from kvmesh.engine.device_pool import DeviceKvPool


class TwinDriver:
    """Runs copies in the calling thread, one after the other.

    Attributes:
        num_marks: calls of `mark`.
        pinned_bytes: reachable by the device now.
        is_broken: copies fail as those of a device that fell off its bus.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.num_marks = 0
        self.pinned_bytes = 0
        self.is_broken = False
        self.threads: set[str] = set()
        self._queue = threading.Lock()

    def mark(self) -> None:
        self.num_marks += 1

    def run(self, work: Callable[[], None]) -> None:
        with self._queue:
            if self.is_broken:
                raise LostError("the device is gone")
            work()
            self.threads.add(threading.current_thread().name)

    def pin(self, memory: memoryview) -> Tensor:
        self.pinned_bytes += memory.nbytes
        return torch.frombuffer(memory, dtype=torch.uint8)

    def unpin(self, pinned: Tensor) -> None:
        self.pinned_bytes -= pinned.nbytes


class TwinPool(DeviceKvPool):
    """A pool on the twin, of given bytes or of zeros, with the tests' own view of it."""

    def __init__(self, layout: KvLayout, num_blocks: int, content: bytes | None = None) -> None:
        self.driver = TwinDriver()
        super().__init__(layout, num_blocks, self.driver)
        if content is not None:
            self.tensor.view(torch.uint8).view(-1).copy_(
                torch.frombuffer(bytearray(content), dtype=torch.uint8)
            )

    def fill(self, byte: int) -> None:
        """Sets every byte of the pool."""
        self.tensor.view(torch.uint8).fill_(byte)
