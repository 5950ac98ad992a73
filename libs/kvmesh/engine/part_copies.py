"""Copies between memory of a device and memory of the host.

Tests: tests/unit/engine/test_device_pool.py, tests/unit/engine/test_divided_pool.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kvmesh.engine.device_driver import DeviceDriver
from kvmesh.kernels.block_ops import copy_pieces
from kvmesh.transfer.device import Moment, Pieces


class PartCopies:
    """Copies between memory of a device and pinned memory of the host. Thread-safe."""

    def __init__(self, driver: DeviceDriver, pool: Tensor, piece_bytes: int, host: Tensor) -> None:
        """Takes as much memory on the device, and compiles the kernel.

        Args:
            pool: [bytes] uint8 on the device.
            piece_bytes: bytes of the largest piece.
            host: [bytes] uint8, pinned.

        Raises:
            LostError: the device failed.
        """
        self._driver = driver
        self._pool = pool
        self._host = host
        self._bounce = torch.empty(0, dtype=torch.uint8)
        driver.run(lambda: self._prepare(piece_bytes), driver.moment())

    def gather(self, pieces: Pieces, at: int, stride: int, after: Moment) -> None:
        """See `StagingMemory.gather`: one kernel on the device, then copies to the host."""
        size, num_bytes = pieces.size, pieces.num_bytes
        assert size <= stride, "pieces do not overlap"
        begin = int(pieces.starts[0])

        def launch() -> None:
            if stride == size and _is_one_range(pieces):
                packed = self._pool[begin : begin + num_bytes]
            else:
                packed = self._bounce[at : at + num_bytes]
                copy_pieces(packed, self._pool, _places(pieces).flip(1), size)
            for on_host, on_device in self._pairs(packed, size, at, stride):
                on_host.copy_(on_device, non_blocking=True)

        self._driver.run(launch, after)

    def scatter(self, pieces: Pieces, at: int, stride: int, after: Moment) -> None:
        """Copies into pieces of the pool: copies to the device, then one kernel.

        Args:
            at, stride: as in `gather`.
        """
        size, num_bytes = pieces.size, pieces.num_bytes
        begin = int(pieces.starts[0])

        def launch() -> None:
            is_straight = stride == size and _is_one_range(pieces)
            packed = (
                self._pool[begin : begin + num_bytes]
                if is_straight
                else self._bounce[at : at + num_bytes]
            )
            for on_host, on_device in self._pairs(packed, size, at, stride):
                on_device.copy_(on_host, non_blocking=True)
            if not is_straight:
                copy_pieces(self._pool, packed, _places(pieces), size)

        self._driver.run(launch, after)

    def close(self) -> None:
        """Frees the memory on the device; no copy may be under way. May be called again."""
        self._bounce = self._pool = self._host = torch.empty(0, dtype=torch.uint8)

    def _prepare(self, piece_bytes: int) -> None:
        # Allocated in the copy queue, so that the allocator's memory is in use by no other queue.
        self._bounce = torch.empty(self._host.nbytes, dtype=torch.uint8, device=self._driver.device)
        # A kernel compiles at its first call, which takes longer than a transfer may stall.
        first = torch.zeros((1, 2), dtype=torch.int64)
        copy_pieces(self._bounce, self._pool, first, min(piece_bytes, self._host.nbytes))

    def _pairs(
        self, packed: Tensor, size: int, at: int, stride: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The same bytes on the host and packed on the device, in as few copies as possible."""
        if stride == size:
            yield self._host[at : at + packed.nbytes], packed
            return
        for index, piece in enumerate(packed.view(-1, size)):
            to = at + index * stride
            yield self._host[to : to + size], piece


def _places(pieces: Pieces) -> Tensor:
    """Returns [pieces, 2]: offsets in the pool, and offsets when packed one after the other."""
    packed = np.arange(len(pieces.starts), dtype=np.int64) * pieces.size
    return torch.from_numpy(np.stack([pieces.starts, packed], axis=1))


def _is_one_range(pieces: Pieces) -> bool:
    return bool((np.diff(pieces.starts) == pieces.size).all())
