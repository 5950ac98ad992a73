"""Interface of a device pool to its device; the rest is torch and kernels.

Not tried on a device so far: tests use a replacement in host memory.
Tests: tests/gpu/test_device_pool.py, tests/unit/engine/test_device_pool.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kvmesh.core.errors import LostError
from kvmesh.engine.cuda_ipc import CudaIpc
from kvmesh.transfer.device import Moment

_PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for all devices, as pools divided among several need it."""


class DeviceDriver(Protocol):
    """A device's copy queue, separate from the queue of steps.

    Attributes:
        device: device of the pools.
    """

    device: torch.device

    def mark(self) -> None:
        """Marks the work launched so far in the calling thread's queue; copies wait for it."""
        ...

    def moment(self) -> Moment:
        """Returns the moment of the latest `mark`."""
        ...

    def is_past(self, moment: Moment) -> bool:
        """Returns whether a moment's work is done; does not wait.

        Raises:
            LostError: the device has failed.
        """
        ...

    def run(self, work: Callable[[], None], after: Moment) -> None:
        """Launches work in the copy queue, after a moment, and waits for its end.

        The waiting thread sleeps without the interpreter lock. Thread-safe.

        Raises:
            LostError: the device failed.
        """
        ...

    def pin(self, memory: memoryview) -> Tensor:
        """Pins host memory; returns it as a byte tensor that the device accesses directly.

        Raises:
            LostError: the device refuses.
        """
        ...

    def unpin(self, pinned: Tensor) -> None:
        """Undoes `pin`."""
        ...

    def zeros(self, num_bytes: int) -> Tensor:
        """Allocates device memory: [bytes] uint8."""
        ...

    def export(self, memory: Tensor) -> tuple[bytes, int]:
        """Returns the handle of the allocation that contains memory, and the memory's offset in it.

        Raises:
            LostError: it cannot be shared.
        """
        ...

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        """Maps the first `num_bytes` of another process's allocation: [bytes] uint8.

        Raises:
            LostError: it cannot be mapped, or is smaller.
        """
        ...

    def close(self, handle: bytes) -> None:
        """Undoes one `open`; its tensor is gone, and no copy is under way.

        Raises:
            LostError: the device refuses.
        """
        ...


class CudaDriver:
    """A CUDA device. Copies run on a stream of higher priority than the steps'."""

    def __init__(self, device: str) -> None:
        """Starts nothing yet.

        Args:
            device: "cuda" or "cuda:N".
        """
        index = torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._ipc: CudaIpc | None = None
        self._marked: torch.cuda.Event | None = None

    def mark(self) -> None:
        """See `DeviceDriver.mark`. Records an event: no host waits."""
        # A new event each time: a wait for an earlier moment must not include this step.
        marked = torch.cuda.Event()  # type: ignore[no-untyped-call]
        marked.record(torch.cuda.current_stream(self.device))
        self._marked = marked

    def moment(self) -> Moment:
        """See `DeviceDriver.moment`."""
        return self._marked

    def is_past(self, moment: Moment) -> bool:
        """See `DeviceDriver.is_past`."""
        if not isinstance(moment, torch.cuda.Event):
            return True
        try:
            return bool(moment.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise LostError(f"{self.device}: {error}") from error

    def run(self, work: Callable[[], None], after: Moment) -> None:
        """See `DeviceDriver.run`."""
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                if isinstance(after, torch.cuda.Event):
                    self._stream.wait_event(after)
                work()
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                done.record(self._stream)
            done.synchronize()
        except RuntimeError as error:  # torch's type for any device error
            raise LostError(f"{self.device}: {error}") from error

    def pin(self, memory: memoryview) -> Tensor:
        """See `DeviceDriver.pin`. Registers the pages, which is slow: once, at the start."""
        pinned = torch.frombuffer(memory, dtype=torch.uint8)
        with torch.cuda.device(self.device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = runtime.cudaHostRegister(pinned.data_ptr(), pinned.nbytes, _PORTABLE)
        if int(code) != 0:
            raise LostError(f"{self.device}: cannot pin {pinned.nbytes} bytes, CUDA error {code}")
        return pinned

    def unpin(self, pinned: Tensor) -> None:
        """See `DeviceDriver.unpin`."""
        with torch.cuda.device(self.device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(pinned.data_ptr())

    def zeros(self, num_bytes: int) -> Tensor:
        """See `DeviceDriver.zeros`."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def export(self, memory: Tensor) -> tuple[bytes, int]:
        """See `DeviceDriver.export`. Memory of torch's expandable segments cannot be shared."""
        return self._calls().export(memory.data_ptr(), memory.nbytes)

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        """See `DeviceDriver.open`."""
        calls = self._calls()
        address = calls.open(handle, num_bytes)
        try:
            # Requested on the memory's own device, since torch would copy it to any other.
            device = torch.device("cuda", calls.ordinal_of(address))
            opened = torch.as_tensor(_CudaBytes(address, num_bytes), device=device)
            if opened.data_ptr() != address:
                raise LostError(f"{self.device}: memory of {device} is out of reach")
        except (LostError, RuntimeError) as error:
            calls.close(handle)
            raise LostError(str(error)) from error
        return opened

    def close(self, handle: bytes) -> None:
        """See `DeviceDriver.close`."""
        self._calls().close(handle)

    def _calls(self) -> CudaIpc:
        if self._ipc is None:
            self._ipc = CudaIpc(self.device.index)
        return self._ipc


class _CudaBytes:
    """Memory at an address, as the CUDA array interface describes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
