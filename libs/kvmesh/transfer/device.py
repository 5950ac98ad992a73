"""Interface of pools in device memory: channels move their blocks through host memory.

Nothing here knows which device it is; `engine.device_pool` does.
Tests: tests/contract/test_channels.py, tests/unit/engine/test_device_pool.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvmesh.transfer.frames import BlockPart
from kvmesh.transfer.run_table import blocks_of, numbers_of

Moment: TypeAlias = object
"""A point in a device's queue of launched work; opaque, and valid only for its own pool."""

HANDLE_BYTES = 64
"""Bytes of the handle by which a device opens another process's memory."""

Starts: TypeAlias = NDArray[np.int64]


class Pieces(NamedTuple):
    """Blocks of a pool, or the same part of each, in the order of their transfer.

    Attributes:
        starts: [count], at least one: first byte of each piece in the pool.
        size: bytes of each piece.
    """

    starts: Starts
    size: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return len(self.starts) * self.size

    def cut(self, first: int, count: int) -> Pieces:
        """Returns at most `count` pieces, starting with number `first`."""
        return Pieces(self.starts[first : first + count], self.size)


def pieces_of(runs: Sequence[tuple[int, ...]], block_bytes: int, part: BlockPart | None) -> Pieces:
    """Returns the blocks of runs whose first number is a block and whose last is a count."""
    numbers = numbers_of(runs)
    offset, size = part or (0, block_bytes)
    assert 0 <= offset <= offset + size <= block_bytes, "a part lies in its block"
    return Pieces(blocks_of(numbers[:, 0], numbers[:, -1]) * block_bytes + offset, size)


class StagingMemory(Protocol):
    """Host memory that the device can access, too.

    `gather` and `scatter` block their thread until the device is done. Several threads may call
    them at once, for disjoint parts of the memory.
    """

    def gather(self, pieces: Pieces, at: int, stride: int, after: Moment) -> None:
        """Copies pieces of the pool into this memory.

        Args:
            at: offset of the first piece in this memory.
            stride: bytes from the start of one piece to that of the next, at least their size.
            after: the copy waits until the steps launched before this moment have written.

        Raises:
            LostError: the device failed.
        """
        ...

    def scatter(self, at: int, pieces: Pieces, after: Moment) -> None:
        """Copies bytes from `at` on into pieces of the pool; steps launched later see them.

        Args:
            after: the copy waits for the steps launched before this moment, which may use the
                pieces.

        Raises:
            LostError: as `gather`.
        """
        ...

    def close(self) -> None:
        """Ends the device's access to the memory; no copy may be under way. May be called again."""
        ...


@runtime_checkable
class DevicePool(Protocol):
    """A pool in memory of a device."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        ...

    def moment(self) -> Moment:
        """Returns the present moment: after every step launched so far.

        In the computing thread: after the last step that it has reported to the pool.
        """
        ...

    def is_past(self, moment: Moment) -> bool:
        """Returns whether all steps before a moment of this pool are computed; does not wait.

        Raises:
            LostError: the device has failed.
        """
        ...

    def staging(self, memory: memoryview) -> StagingMemory:
        """Makes host memory accessible to the device; it stays mapped until `close`.

        Raises:
            LostError: the device refuses.
        """
        ...


class SharedMemory(NamedTuple):
    """A pool's memory, as another process of the host opens it.

    Attributes:
        handle: handle of the allocation that contains it; `HANDLE_BYTES` opaque bytes.
        offset: offset of the pool's first byte in the allocation.
        num_bytes: bytes of the pool.
    """

    handle: bytes
    offset: int
    num_bytes: int


class PeerMemory(Protocol):
    """A pool of another process, mapped into this pool's device."""

    def copy(self, targets: Pieces, sources: Pieces, after: Moment) -> None:
        """Copies pieces of the peer's pool into as many of this one.

        Blocks its thread until the device is done; several threads may call it at once.

        Args:
            after: as in `StagingMemory.scatter`.

        Raises:
            LostError: the device failed.
        """
        ...

    def close(self) -> None:
        """Unmaps the pool; no copy may be under way. May be called again.

        Raises:
            LostError: the device failed.
        """
        ...


@runtime_checkable
class SharedPool(DevicePool, Protocol):
    """A device pool that devices of other processes may read. The methods block."""

    def share(self) -> SharedMemory:
        """Returns the handle by which other processes open the pool.

        Raises:
            LostError: this device, or this memory, cannot be shared.
        """
        ...

    def settle(self, after: Moment) -> None:
        """Waits until the steps launched before a moment have written.

        Raises:
            LostError: the device failed.
        """
        ...

    def map_peer(self, memory: SharedMemory) -> PeerMemory:
        """Maps the pool of another process.

        Raises:
            LostError: the memory does not exist, or this device cannot reach it.
        """
        ...
