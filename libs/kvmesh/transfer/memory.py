"""KV pools in memory that another process of the host can map.

A pool's memfd is sealed against shrinking, so a peer cannot kill a process that maps it by
truncating it. Tests: tests/unit/transfer/test_memory.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import time
from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from kvmesh.core.errors import ConfigError
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.frames import BlockPart
from kvmesh.transfer.native import (
    PlacedViews,
    Ranges,
    address_of,
    as_ranges,
    load_native,
    num_bytes_of,
    ranges_at,
    ranges_of,
)
from kvmesh.transfer.pages import populate
from kvmesh.transfer.run_table import MANY_RUNS, Numbers, RunTable, blocks_of, end_of, numbers_of

Places: TypeAlias = Sequence[tuple[int, int]] | Ranges
"""(address, number of bytes) of each range; a table if there are many."""

COPY_INLINE_BYTES = 1 << 20
"""Maximum bytes copied on the event loop, which takes a tenth of a millisecond or two."""
_LARGE_BYTES = 1 << 20
_FEW_RANGES = 8
"""Number of ranges up to which a table of addresses does not pay."""
_memmove_locked = ctypes.PyDLL(None).memmove
_memmove_locked.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_locked.restype = None


class PoolMemory(Protocol):
    """A sender's pool (`engine.protocol.KvMemory` is one)."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        ...

    def read_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Returns the bytes of a run of blocks; the caller keeps them referenced during use."""
        ...


class WritableMemory(Protocol):
    """A receiver's pool (`engine.protocol.KvMemory` is one)."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        ...

    def write_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Returns the memory of a run of blocks, to be filled."""
        ...


@runtime_checkable
class MappablePool(Protocol):
    """A pool in a memfd, block 0 at offset 0.

    Attributes:
        fd: the memfd.
    """

    fd: int


def create_shared(name: str, num_bytes: int) -> tuple[int, mmap.mmap]:
    """Creates and maps a sealed memfd of zeros, with all its pages. The caller closes it.

    Raises:
        ConfigError: the host has too little memory.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    mapping = with_huge_pages(mmap.mmap(fd, num_bytes))
    try:
        populate(mapping)
    except ConfigError:
        os.close(fd)
        raise
    return fd, mapping


class MappingError(Exception):
    """A descriptor that a peer sent cannot be mapped safely."""


class MappedPool:
    """A peer's pool, mapped read-only."""

    def __init__(self, fd: int, num_blocks: int, block_bytes: int) -> None:
        """Maps the descriptor, which stays the caller's.

        Raises:
            MappingError: not a sealed memfd, or too small.
        """
        num_bytes = num_blocks * block_bytes
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size = os.fstat(fd).st_size
            if not seals & fcntl.F_SEAL_SHRINK or size < num_bytes:
                raise MappingError(f"{size} bytes for {num_blocks} blocks, seals {seals:#x}")
            self._map = with_huge_pages(mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ))
        except (OSError, ValueError) as error:
            raise MappingError(str(error)) from error
        self._block_bytes = block_bytes
        self._view: memoryview | None = memoryview(self._map)
        self._address = address_of(self._view)
        self._num_blocks = num_blocks

    def byte_ranges(self, runs: Sequence[tuple[int, ...]], part: BlockPart | None = None) -> Places:
        """Returns (address, number of bytes) of runs; valid until `close`.

        Args:
            runs: tuples whose first number is a block and whose last one is a count.
            part: only these bytes of each block.
        """
        assert self._view is not None, "the mapping is closed"
        assert end_of(runs) <= self._num_blocks, "outside of the pool"
        base, size = self._address, self._block_bytes
        if type(runs) is RunTable:
            return ranges_at(base, places_of(runs.numbers, size, part))
        ranges = [(base + run[0] * size, run[-1] * size) for run in runs]
        if part is None:
            return ranges
        return [
            (at + part.offset, part.size)
            for start, num_bytes in ranges
            for at in range(start, start + num_bytes, size)
        ]

    def close(self) -> None:
        """Unmaps the pool; no copy may be under way. May be called again."""
        if self._view is not None:
            self._view.release()
            self._view = None
            self._map.close()


def with_huge_pages(mapping: mmap.mmap) -> mmap.mmap:
    """Asks for huge pages, and returns the mapping: fewer page faults and TLB misses in copies.

    Some kernels refuse them for memfds.
    """
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def part_views(run: memoryview, block_bytes: int, offset: int, size: int) -> list[memoryview]:
    """Returns `size` bytes from `offset` on of each block of a run."""
    starts = range(offset, run.nbytes, block_bytes)
    return [run[start : start + size] for start in starts]


def run_views(
    memory: PoolMemory, runs: Sequence[Run], block_bytes: int, part: BlockPart | None
) -> Sequence[memoryview]:
    """Returns the bytes of a sender's runs, in order; with `part` only this part of each block."""
    if type(runs) is RunTable and isinstance(memory, MappablePool):
        whole = memory.read_view(0, memory.num_blocks)
        return PlacedViews(whole, places_of(runs.numbers, block_bytes, part))
    views = [memory.read_view(run.source_start, run.count) for run in runs]
    if part is None:
        return views
    return [piece for view in views for piece in part_views(view, block_bytes, *part)]


def write_views(
    memory: WritableMemory,
    runs: Sequence[tuple[int, int]],
    block_bytes: int,
    part: BlockPart | None,
) -> Sequence[memoryview]:
    """Returns the memory of (first block, count) runs, or of one part of each block, in order."""
    if len(runs) >= MANY_RUNS and isinstance(memory, MappablePool):
        whole = memory.write_view(0, memory.num_blocks)
        return PlacedViews(whole, places_of(numbers_of(runs), block_bytes, part))
    views = [memory.write_view(first, count) for first, count in runs]
    if part is None:
        return views
    return [piece for view in views for piece in part_views(view, block_bytes, *part)]


def places_of(numbers: Numbers, block_bytes: int, part: BlockPart | None) -> Numbers:
    """Returns offset and number of bytes in a pool of each run, or of one part of each block.

    Args:
        numbers: [num_runs, columns]: the first is the first block of a run, the last its length.
    """
    first, count = numbers[:, 0], numbers[:, -1]
    if part is None:
        return np.column_stack((first, count)) * block_bytes
    starts = blocks_of(first, count) * block_bytes + part.offset
    return np.column_stack((starts, np.full_like(starts, part.size)))


def copy_views(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    """Copies the bytes of `sources`, in order, into `targets`; their boundaries may differ.

    Releases the interpreter lock at least once per MiB.
    """
    if type(sources) is PlacedViews:
        copy_ranges(targets, sources.ranges)
    else:
        copy_ranges(targets, [(address_of(view), view.nbytes) for view in sources])


def copy_ranges(targets: Sequence[memoryview], sources: Places, *, num_threads: int = 1) -> None:
    """Variant of `copy_views` for (address, number of bytes); the caller keeps the memory alive.

    Args:
        num_threads: number of threads that share a large copy.
    """
    num_bytes = num_bytes_at(sources)
    assert num_bytes == num_bytes_of(targets), "as many bytes here as there"
    # Large copies use the native library for its non-temporal stores, which bypass the cache.
    worth_it = len(targets) + len(sources) > _FEW_RANGES or num_bytes > COPY_INLINE_BYTES
    if worth_it and (native := load_native()) is not None:
        is_short = num_bytes <= COPY_INLINE_BYTES
        from_ = sources if isinstance(sources, np.ndarray) else as_ranges(sources)
        native.copy(ranges_of(targets), from_, is_short=is_short, num_threads=num_threads)
        return
    copy_in_python(targets, sources.tolist() if isinstance(sources, np.ndarray) else sources)


def num_bytes_at(places: Places) -> int:
    """Returns the number of bytes of all ranges."""
    if isinstance(places, np.ndarray):
        return int(places[:, 1].sum())
    return sum([size for _, size in places])


def copy_in_python(targets: Sequence[memoryview], sources: Sequence[tuple[int, int]]) -> None:
    """Variant of `copy_ranges` for few ranges or without the native library; no empty views."""
    pieces = iter(sources)
    source, size, held_bytes = 0, 0, 0
    for target in targets:
        # ctypes instead of NumPy takes a third of the time for small blocks.
        destination = ctypes.addressof(ctypes.c_char.from_buffer(target))
        left = target.nbytes
        while left:
            if size == 0:
                source, size = next(pieces)
            count = left if left < size else size
            if count >= _LARGE_BYTES:
                ctypes.memmove(destination, source, count)
            else:
                # Releasing the lock for each small piece would cost more than the piece.
                _memmove_locked(destination, source, count)
                held_bytes += count
                if held_bytes >= _LARGE_BYTES:
                    held_bytes = 0
                    time.sleep(0)
            destination, left = destination + count, left - count
            source, size = source + count, size - count
