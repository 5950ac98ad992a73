"""CUDA memory of other processes of the host, through the CUDA driver API.

torch cannot be used: its tensors travel between processes by pickling and with counters in files.
Not tried on a device so far; a stand-in for the driver checks the calls.
Tests: tests/unit/engine/test_cuda_ipc.py, tests/gpu/test_device_ipc.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvmesh.core.errors import LostError
from kvmesh.transfer.device import HANDLE_BYTES

_LAZY_PEER_ACCESS = 1
_DEVICE_ORDINAL = 9
"""CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL"""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Opened(NamedTuple):
    address: int
    num_users: int


class CudaIpc:
    """Exports and opens allocations in one device's primary context. Any thread may call."""

    def __init__(self, ordinal: int, library: str = "libcuda.so.1") -> None:
        """Loads the driver, which torch has started.

        Args:
            ordinal: number of the device among those that this process sees.
            library: file name of the driver library.

        Raises:
            LostError: there is no driver, or no such device.
        """
        try:
            self._driver = ctypes.CDLL(library)
        except OSError as error:
            raise LostError(f"cuda:{ordinal}: {error}") from error
        self._declare()
        self._name = f"cuda:{ordinal}"
        device = ctypes.c_int()
        self._check("cuDeviceGet", ctypes.byref(device), ordinal)
        self._device = device.value
        # Each allocation is opened once for all of its users: some drivers refuse a second time.
        self._opened: dict[bytes, _Opened] = {}
        self._lock = threading.Lock()

    def export(self, address: int, num_bytes: int) -> tuple[bytes, int]:
        """Returns the handle of the allocation that contains memory, and the memory's offset in it.

        Raises:
            LostError: this kind of memory cannot be shared.
        """
        with self._context():
            base, size = self._range(address)
            offset = address - base
            if offset + num_bytes > size:
                raise LostError(f"{self._name}: the pool is not one allocation")
            handle = _Handle()
            self._check("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle), offset

    def open(self, handle: bytes, num_bytes: int) -> int:
        """Opens another process's allocation of at least `num_bytes`; returns its address.

        Raises:
            LostError: it does not exist, is not reachable from this device, or is smaller.
        """
        with self._lock, self._context():
            known = self._opened.get(handle)
            if known is None:
                address = ctypes.c_uint64()
                given = _Handle.from_buffer_copy(handle)
                self._check(
                    "cuIpcOpenMemHandle_v2", ctypes.byref(address), given, _LAZY_PEER_ACCESS
                )
                known = _Opened(address.value, 0)
            self._opened[handle] = _Opened(known.address, known.num_users + 1)
            try:
                self._require(known.address, num_bytes)
            except LostError:
                self._close_locked(handle)
                raise
            return known.address

    def close(self, handle: bytes) -> None:
        """Undoes one `open`; no copy may be under way.

        Raises:
            LostError: the driver refuses.
        """
        with self._lock, self._context():
            self._close_locked(handle)

    def ordinal_of(self, address: int) -> int:
        """Returns the device that holds the memory.

        Raises:
            LostError: it is not on a device that this process sees.
        """
        ordinal = ctypes.c_int()
        with self._context():
            self._check("cuPointerGetAttribute", ctypes.byref(ordinal), _DEVICE_ORDINAL, address)
        return ordinal.value

    def _close_locked(self, handle: bytes) -> None:
        opened = self._opened.pop(handle)
        if opened.num_users > 1:
            self._opened[handle] = _Opened(opened.address, opened.num_users - 1)
        else:
            self._check("cuIpcCloseMemHandle", opened.address)

    def _require(self, address: int, num_bytes: int) -> None:
        try:
            _, size = self._range(address)
        except LostError:  # not documented for imported memory, whose owner has checked the size
            return
        if size < num_bytes:
            raise LostError(f"{self._name}: {size} bytes are shared, {num_bytes} were announced")

    def _range(self, address: int) -> tuple[int, int]:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._check("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        """Binds the device's primary context, torch's own, to the calling thread."""
        context = ctypes.c_void_p()
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        try:
            self._check("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._check("cuCtxPopCurrent_v2", ctypes.byref(context))
        finally:
            self._check("cuDevicePrimaryCtxRelease_v2", self._device)

    def _declare(self) -> None:
        """Declares argument types: undeclared integers would be cut to 32 bits."""
        pointer, address, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
        for name, types in {
            "cuDeviceGet": (pointer, number),
            "cuDevicePrimaryCtxRetain": (pointer, number),
            "cuDevicePrimaryCtxRelease_v2": (number,),
            "cuCtxPushCurrent_v2": (pointer,),
            "cuCtxPopCurrent_v2": (pointer,),
            "cuMemGetAddressRange_v2": (pointer, pointer, address),
            "cuIpcGetMemHandle": (pointer, address),
            "cuIpcOpenMemHandle_v2": (pointer, _Handle, ctypes.c_uint),
            "cuIpcCloseMemHandle": (address,),
            "cuPointerGetAttribute": (pointer, number, address),
            "cuGetErrorName": (number, ctypes.POINTER(ctypes.c_char_p)),
        }.items():
            function = getattr(self._driver, name)
            function.argtypes, function.restype = types, ctypes.c_int

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code == 0:
            return
        text = ctypes.c_char_p()
        self._driver.cuGetErrorName(code, ctypes.byref(text))
        why = (text.value or b"unknown").decode()
        raise LostError(f"{self._name}: {name}: {why} ({code})")
