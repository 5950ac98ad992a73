"""Memory of a CPU engine's rank, behind the interface of a device.

Ranks on CPUs of several hosts cannot share one pool, so each keeps its part of every block as it
would on a device. Steps are computed when they return, so copies wait for nothing.
Tests: tests/contract/test_device_driver.py.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from kvmesh.core.errors import LostError
from kvmesh.transfer.device import HANDLE_BYTES, Moment
from kvmesh.transfer.memory import create_shared

_HANDLE = struct.Struct(f"<QI{HANDLE_BYTES - 12}x")


class HostDriver:
    """The `DeviceDriver` of memory on the host. Other processes of its user can map the memory."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._kept: list[tuple[Tensor, int]] = []

    def mark(self) -> None:
        """See `DeviceDriver.mark`."""

    def moment(self) -> Moment:
        """See `DeviceDriver.moment`."""
        return None

    def is_past(self, moment: Moment) -> bool:
        """See `DeviceDriver.is_past`."""
        return True

    def run(self, work: Callable[[], None], after: Moment) -> None:
        """See `DeviceDriver.run`."""
        work()

    def pin(self, memory: memoryview) -> Tensor:
        """See `DeviceDriver.pin`."""
        return torch.frombuffer(memory, dtype=torch.uint8)

    def unpin(self, pinned: Tensor) -> None:
        """See `DeviceDriver.unpin`."""

    def zeros(self, num_bytes: int) -> Tensor:
        """See `DeviceDriver.zeros`."""
        fd, memory = create_shared("kvmesh-part", num_bytes)
        weakref.finalize(self, os.close, fd)
        zeros = torch.frombuffer(memory, dtype=torch.uint8)
        self._kept.append((zeros, fd))
        return zeros

    def export(self, memory: Tensor) -> tuple[bytes, int]:
        """See `DeviceDriver.export`."""
        for kept, fd in self._kept:
            offset = memory.data_ptr() - kept.data_ptr()
            if 0 <= offset <= kept.nbytes - memory.nbytes:
                return _HANDLE.pack(os.getpid(), fd), offset
        raise LostError("this memory was allocated elsewhere")

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        """See `DeviceDriver.open`."""
        pid, number = _HANDLE.unpack(handle)
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        except OSError as error:
            raise LostError(f"no such memory: {error}") from error
        try:
            mapped = mmap.mmap(fd, num_bytes)
        except (OSError, ValueError) as error:
            raise LostError(f"smaller than announced: {error}") from error
        finally:
            os.close(fd)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def close(self, handle: bytes) -> None:
        """See `DeviceDriver.close`. The mapping ends with its tensor."""
