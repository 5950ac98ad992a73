"""A device in host memory, in a memfd of its own: what `CudaDriver` does, without CUDA.

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
from kvmesh.engine.device_driver import DeviceDriver
from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.engine.host_driver import HostDriver
from kvmesh.transfer.device import Moment

_BEFORE = 4096


class TwinDriver(HostDriver):
    """Runs copies in the calling thread, one after the other.

    Attributes:
        num_marks: calls of `mark`.
        threads: names of those that waited for copies.
        awaited: per call of `run`, the number of marks that it waited for.
        pinned_bytes: reachable by the device now.
        past: the number of marks that it has come to; None: it is always at the last one.
        is_broken: copies fail as those of a device that fell off its bus.
        is_private: its memory cannot be shared.
        num_open: memory of others that is mapped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_marks = 0
        self.past: int | None = None
        self.awaited: list[Moment] = []
        self.pinned_bytes = 0
        self.is_broken = False
        self.is_private = False
        self.num_open = 0
        self.threads: list[str] = []
        self._queue = threading.Lock()

    def mark(self) -> None:
        self.num_marks += 1

    def moment(self) -> Moment:
        return self.num_marks

    def is_past(self, moment: Moment) -> bool:
        assert isinstance(moment, int), "one of this device"
        return self.past is None or moment <= self.past

    def run(self, work: Callable[[], None], after: Moment) -> None:
        with self._queue:
            self.awaited.append(after)
            if self.is_broken:
                raise LostError("the device is gone")
            work()
            self.threads.append(threading.current_thread().name)

    def pin(self, memory: memoryview) -> Tensor:
        self.pinned_bytes += memory.nbytes
        return torch.frombuffer(memory, dtype=torch.uint8)

    def unpin(self, pinned: Tensor) -> None:
        self.pinned_bytes -= pinned.nbytes

    def zeros(self, num_bytes: int) -> Tensor:
        # The pool does not begin where its memory does, as in an allocation shared with others.
        return super().zeros(_BEFORE + num_bytes)[_BEFORE:]

    def export(self, memory: Tensor) -> tuple[bytes, int]:
        if self.is_private:
            raise LostError("this memory cannot be shared")
        return super().export(memory)

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        mapped = super().open(handle, num_bytes)
        self.num_open += 1
        return mapped

    def close(self, handle: bytes) -> None:
        self.num_open -= 1


def twin_driver(_index: int) -> TwinDriver:
    """Takes the place of `vllm_memory.cuda_driver`."""
    return TwinDriver()


class FilledPool(DeviceKvPool):
    """A pool on any device, of given bytes or of zeros, with the tests' own view of it."""

    def __init__(
        self,
        driver: DeviceDriver,
        layout: KvLayout,
        num_blocks: int,
        content: bytes | None = None,
    ) -> None:
        super().__init__(layout, num_blocks, driver)
        if content is not None:
            self.tensor.view(torch.uint8).view(-1).copy_(
                torch.frombuffer(bytearray(content), dtype=torch.uint8)
            )
            self.computed()

    def fill(self, byte: int) -> None:
        """Sets every byte of the pool."""
        self.tensor.view(torch.uint8).fill_(byte)


class TwinPool(FilledPool):
    """A pool on the twin."""

    def __init__(self, layout: KvLayout, num_blocks: int, content: bytes | None = None) -> None:
        self.driver = TwinDriver()
        super().__init__(self.driver, layout, num_blocks, content)
