"""Bindings of `native.cpp`: copies and socket transfers that release the interpreter lock.

`make setup` or a wheel builds it. Without it the callers use Python.
Tests: tests/unit/transfer/test_native.py.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from kvmesh.core.native_libraries import TRANSFER, NativeError, load_library
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

Ranges: TypeAlias = NDArray[np.uint64]
"""[count, 2]: address and number of bytes; C order. The creator keeps the memory alive."""


class NativeState(ctypes.Structure):
    """State that a running call shares with the interpreter.

    Attributes:
        moved: bytes moved so far; only rises.
        stop: set to 1 to end the call at its next piece.
    """

    _fields_ = (("moved", ctypes.c_int64), ("stop", ctypes.c_int64))

    moved: int
    stop: int


class NativeIo:
    """The functions of the library.

    Attributes:
        level: instruction set level that the library uses.
    """

    def __init__(self, library: ctypes.CDLL, level: str) -> None:
        self.level = level
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        flag = ctypes.c_int
        self._send, self._receive = library.kvmesh_send, library.kvmesh_receive
        self._send.argtypes = (flag, pointer, number, flag, flag, pointer, pointer)
        self._receive.argtypes = (flag, pointer, number, flag, pointer, pointer)
        self._send.restype = self._receive.restype = flag
        self._crc32c = library.kvmesh_crc32c
        self._crc32c.argtypes = (pointer, ctypes.c_uint64, ctypes.c_uint32)
        self._crc32c.restype = ctypes.c_uint32
        # PyDLL keeps the interpreter lock during the call, which is cheaper for short copies.
        self._copy, self._copy_locked = library.kvmesh_copy, ctypes.PyDLL(library._name).kvmesh_copy
        for function in (self._copy, self._copy_locked):
            function.argtypes = (pointer, number, pointer, number, number)
            function.restype = None
        self._poll = library.kvmesh_poll
        self._poll.argtypes, self._poll.restype = (ctypes.c_int, number), ctypes.c_int
        self.has_crc32c = bool(library.kvmesh_has_crc32c())

    def copy(
        self, targets: Ranges, sources: Ranges, *, is_short: bool, num_threads: int = 1
    ) -> None:
        """Copies the bytes of `sources`, in order, into `targets`; their boundaries may differ.

        Args:
            is_short: keep the interpreter lock.
            num_threads: number of threads that share a copy of 4 MiB or more.
        """
        copy = self._copy_locked if is_short else self._copy
        addresses = targets.ctypes.data, sources.ctypes.data
        copy(addresses[0], len(targets), addresses[1], len(sources), num_threads)

    def poll(self, fd: int, wait_s: float) -> bool:
        """Polls for up to `wait_s` seconds; returns whether there are bytes, an end or an error."""
        return bool(self._poll(fd, int(wait_s * 1e9)))

    def crc32c(self, ranges: Ranges, value: int) -> int:
        """Returns the running crc32c of these bytes; only with `has_crc32c`."""
        for address, size in ranges.tolist():
            value = self._crc32c(address, size, value)
        return value

    def send(
        self, fd: int, ranges: Ranges, state: NativeState, *, has_sum: bool, lends: bool = False
    ) -> int:
        """Sends all bytes through a blocking socket; returns their crc32c, or 0 without a sum.

        Args:
            lends: zero-copy send, where the kernel supports it: the socket's queue refers to the
                memory, which must not change before the peer has confirmed all of it.

        Raises:
            OSError: the socket failed, or `state.stop` was set (ECANCELED).
        """
        return _moved(partial(self._send, fd), ranges, (has_sum, lends), state)

    def receive(self, fd: int, ranges: Ranges, state: NativeState, *, has_sum: bool) -> int:
        """Fills all ranges from a blocking socket; returns their crc32c, or 0 without a sum.

        Raises:
            OSError: as `send`; ECONNRESET also at the end of the stream.
        """
        return _moved(partial(self._receive, fd), ranges, (has_sum,), state)


def _moved(
    call: Callable[..., int], ranges: Ranges, flags: tuple[bool, ...], state: NativeState
) -> int:
    value = ctypes.c_uint32()
    address = ranges.ctypes.data
    error = call(address, len(ranges), *flags, ctypes.byref(value), ctypes.byref(state))
    if error:
        raise OSError(error, "data socket")
    return value.value


@functools.cache
def load_native() -> NativeIo | None:
    """Returns the compiled functions; None if they cannot be loaded, with one warning."""
    try:
        loaded = load_library(TRANSFER)
    except NativeError as error:
        log.warning("native_missing", error=str(error), instead="data moves through Python")
        return None
    return NativeIo(loaded.library, loaded.level)


class PlacedViews(Sequence[memoryview]):
    """Views of places in one memory; their addresses are computed without creating the views.

    Attributes:
        num_bytes: bytes of all views.
    """

    def __init__(self, memory: memoryview, places: NDArray[np.int64]) -> None:
        """Keeps the memory alive.

        Args:
            memory: contiguous bytes.
            places: [count, 2]: offset and number of bytes, none of which is 0.
        """
        self._memory = memory
        self._places = places
        self.num_bytes = int(places[:, 1].sum())

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> PlacedViews: ...
    def __getitem__(self, index: int | slice) -> memoryview | PlacedViews:
        if isinstance(index, slice):
            return PlacedViews(self._memory, self._places[index])
        offset, size = self._places[index].tolist()
        return self._memory[offset : offset + size]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[memoryview]:
        for offset, size in self._places.tolist():
            yield self._memory[offset : offset + size]

    @property
    def ranges(self) -> Ranges:
        """Addresses and sizes of the views; valid while this object is held."""
        return ranges_at(address_of(self._memory), self._places)


def num_bytes_of(views: Sequence[memoryview]) -> int:
    """Returns the number of bytes of all views."""
    if type(views) is PlacedViews:
        return views.num_bytes
    return sum([view.nbytes for view in views])


def ranges_at(address: int, places: NDArray[np.int64]) -> Ranges:
    """Returns the ranges of places ([count, 2]: offset, number of bytes) in memory at `address`."""
    ranges = places.astype(np.uint64)
    ranges[:, 0] += np.uint64(address)
    return ranges


def ranges_of(views: Iterable[memoryview]) -> Ranges:
    """Returns the ranges of contiguous views, without empty ones; the caller holds the views."""
    if type(views) is PlacedViews:
        return views.ranges
    return as_ranges([(address_of(view), view.nbytes) for view in views if view.nbytes])


def as_ranges(pairs: Sequence[tuple[int, int]]) -> Ranges:
    """Converts (address, number of bytes) pairs to ranges."""
    return np.array(pairs, dtype=np.uint64).reshape(-1, 2)


def address_of(view: memoryview) -> int:
    """Returns the address of a contiguous view that is not empty; valid while it is held."""
    if view.readonly:  # costs a third more
        address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
        return address
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
