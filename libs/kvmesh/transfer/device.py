"""Pools that only a device reaches, as channels see them: through memory that both sides reach.

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
"""A point in what a device was given to compute; a pool's own, and of use to it alone."""

HANDLE_BYTES = 64
"""Of the name by which a device knows memory of another process."""

Starts: TypeAlias = NDArray[np.int64]


class Pieces(NamedTuple):
    """Blocks of a pool, or the same part of each, in the order in which they travel.

    Attributes:
        starts: [count], at least one: first byte of each in the pool.
        size: bytes of each.
    """

    starts: Starts
    size: int

    @property
    def num_bytes(self) -> int:
        """Of all pieces."""
        return len(self.starts) * self.size

    def cut(self, first: int, count: int) -> Pieces:
        """At most `count` pieces from number `first` on."""
        return Pieces(self.starts[first : first + count], self.size)


def pieces_of(runs: Sequence[tuple[int, ...]], block_bytes: int, part: BlockPart | None) -> Pieces:
    """The blocks of runs, whose first number is a block and the last a count."""
    numbers = numbers_of(runs)
    offset, size = part or (0, block_bytes)
    assert 0 <= offset <= offset + size <= block_bytes, "a part lies in its block"
    return Pieces(blocks_of(numbers[:, 0], numbers[:, -1]) * block_bytes + offset, size)


class StagingMemory(Protocol):
    """Host memory that the device reaches as well.

    `gather` and `scatter` block their thread until the device is done; several threads may call
    them at once, for parts of the memory that do not overlap.
    """

    def gather(self, pieces: Pieces, at: int, stride: int, after: Moment) -> None:
        """Copies pieces of the pool here.

        Args:
            after: not before the steps until then have written.
            at: where the first piece goes.
            stride: from the beginning of one piece to that of the next, at least their size.

        Raises:
            LostError: the device failed.
        """
        ...

    def scatter(self, at: int, pieces: Pieces, after: Moment) -> None:
        """Copies bytes from `at` on into pieces of the pool; steps launched later see them.

        Args:
            after: the steps until then may still use the pieces.

        Raises:
            LostError: as `gather`.
        """
        ...

    def close(self) -> None:
        """The device reaches the memory no more; nothing is under way. May be called again."""
        ...


@runtime_checkable
class DevicePool(Protocol):
    """A pool in memory of a device."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        ...

    def moment(self) -> Moment:
        """Now: behind every step that was launched so far.

        In the thread that computes: behind what it last told the pool that it had launched.
        """
        ...

    def is_past(self, moment: Moment) -> bool:
        """Whether everything before a moment of this pool has been computed; waits for nothing.

        Raises:
            LostError: the device has failed.
        """
        ...

    def staging(self, memory: memoryview) -> StagingMemory:
        """Makes host memory reachable for the device; it stays mapped until `close`.

        Raises:
            LostError: the device refuses.
        """
        ...


class SharedMemory(NamedTuple):
    """A pool's memory as another process of the host finds it.

    Attributes:
        handle: of the allocation it lies in; `HANDLE_BYTES` of the device's own words.
        offset: of the pool's first byte in the allocation.
        num_bytes: of the pool.
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
        """Unmaps it; nothing is under way. May be called again.

        Raises:
            LostError: the device failed.
        """
        ...


@runtime_checkable
class SharedPool(DevicePool, Protocol):
    """A device pool that devices of other processes may read. The methods block."""

    def share(self) -> SharedMemory:
        """How they find it.

        Raises:
            LostError: this device, or this memory, cannot be shared.
        """
        ...

    def settle(self, after: Moment) -> None:
        """Returns when the steps until then have written.

        Raises:
            LostError: the device failed.
        """
        ...

    def map_peer(self, memory: SharedMemory) -> PeerMemory:
        """Maps the pool of another process.

        Raises:
            LostError: it is not there, or out of this device's reach.
        """
        ...
