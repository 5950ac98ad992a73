"""Gives vLLM the memory for its KV cache, at the moment when vLLM would allocate it.

On the host all ranks share one pool. On devices each rank keeps its part of every block in memory
of its own device, which the leader maps to copy blocks to and from the host.

Tests: tests/unit/engine/test_vllm_memory.py, tests/vllm/test_ranks.py.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kvmesh.core.errors import ConfigError, LostError
from kvmesh.core.kv_formats import KV_DTYPE_BYTES
from kvmesh.core.types import KvLayout
from kvmesh.engine.device_driver import CudaDriver, DeviceDriver
from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.engine.divided_pool import DevicePart, DividedPool
from kvmesh.engine.host_memory import HostMemory
from kvmesh.engine.kv_shape import SPARE_BLOCKS
from kvmesh.engine.memory import MemoryNeed, available_bytes, require_memory
from kvmesh.engine.rank_part import RankPart
from kvmesh.engine.vllm_messages import (
    KeptPart,
    encoded,
    kept_message,
    read_kept,
    read_pool,
    receive,
)
from kvmesh.engine.vllm_ranks import Ranks

MakeDriver = Callable[[int], DeviceDriver]
"""Returns the driver of the device with a number."""


def cuda_driver(index: int) -> DeviceDriver:
    """Returns the driver of the CUDA device with a number."""
    return CudaDriver(f"cuda:{index}")


class CacheMemory(Protocol):
    """Memory of one rank's KV cache."""

    @property
    def is_shared(self) -> bool:
        """Whether the memory has the blocks of all ranks, not one rank's part of each."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Returns [bytes] uint8 of zeros. Called once.

        Raises:
            ConfigError: there is not as much memory.
        """
        ...


class HostCache:
    """The leader's memory on a host: a pool that all ranks map."""

    is_shared = True

    def __init__(self, num_blocks: int, ranks: Ranks | None) -> None:
        self._num_blocks = num_blocks
        self._ranks = ranks
        self._pool: HostMemory | None = None

    def allocate(self, num_bytes: int) -> Tensor:
        """See `CacheMemory.allocate`."""
        require_memory(MemoryNeed(0, num_bytes, 0), available_bytes())
        block_bytes = num_bytes // (self._num_blocks + SPARE_BLOCKS)
        self._pool = HostMemory(self._num_blocks, block_bytes, SPARE_BLOCKS)
        if self._ranks is not None:
            self._ranks.allow_cache(num_bytes, self._pool.fd)
        return torch.frombuffer(self._pool.view, dtype=torch.uint8)

    def pool(self, _layout: KvLayout, _part: RankPart) -> HostMemory:
        """The pool, after `allocate`."""
        assert self._pool is not None, "vLLM asked for its cache"
        return self._pool


class DeviceCache:
    """The leader's memory on its device.

    Args:
        make_driver: takes the number of a device.
        first_device: number of the leader's device; those of the other ranks follow.
    """

    is_shared = False

    def __init__(
        self, num_blocks: int, ranks: Ranks | None, make_driver: MakeDriver, first_device: int
    ) -> None:
        self._num_blocks = num_blocks
        self._ranks = ranks
        self._make_driver = make_driver
        self._first_device = first_device
        self._driver = make_driver(first_device)
        self._memory: Tensor | None = None

    def allocate(self, num_bytes: int) -> Tensor:
        """See `CacheMemory.allocate`."""
        if self._ranks is not None:
            self._ranks.allow_cache()
        self._memory = device_memory(self._driver, num_bytes)
        return self._memory

    def pool(self, layout: KvLayout, part: RankPart) -> DeviceKvPool | DividedPool:
        """The pool, after `allocate`; waits until the other ranks have loaded.

        Args:
            part: of the leader.

        Raises:
            ConfigError: memory of another rank cannot be reached.
        """
        assert self._memory is not None, "vLLM asked for its cache"
        if self._ranks is None:
            return DeviceKvPool(layout, self._num_blocks, self._driver, self._memory)
        parts = [DevicePart(self._driver, self._memory, part.runs(KV_DTYPE_BYTES[layout.dtype]))]
        for rank, message in enumerate(self._ranks.hear(), 1):
            kept = read_kept(message)
            driver = self._make_driver(self._first_device + rank)
            try:
                mapped = driver.open(kept.handle, kept.offset + kept.num_bytes)
            except LostError as error:
                raise ConfigError(f"memory of rank {rank} is out of reach: {error}") from error
            parts.append(DevicePart(driver, mapped[kept.offset :], kept.runs, kept.handle))
        return DividedPool(layout.block_bytes, self._num_blocks, parts)


class FollowerCache:
    """The memory of a rank other than the leader.

    Args:
        leader: the socket to it.
        driver: of the rank's device; None: the leader's pool on the host.
    """

    def __init__(self, leader: socket.socket, driver: DeviceDriver | None) -> None:
        self._leader = leader
        self._driver = driver
        self._memory: Tensor | None = None

    @property
    def is_shared(self) -> bool:
        """See `CacheMemory.is_shared`."""
        return self._driver is None

    def allocate(self, num_bytes: int) -> Tensor:
        """See `CacheMemory.allocate`. Waits until the leader has found no fault in the model."""
        pool_bytes = read_pool(receive(self._leader))
        if self._driver is not None:
            self._memory = device_memory(self._driver, num_bytes)
            return self._memory
        assert pool_bytes == num_bytes, "the ranks have one pool"
        _, (fd,), _, _ = socket.recv_fds(self._leader, 1, 1)
        mapping = mmap.mmap(fd, num_bytes)
        os.close(fd)
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def tell_leader(self, part: RankPart, value_bytes: int) -> None:
        """Tells the leader where this rank's device keeps its part, so that it can map it.

        Args:
            value_bytes: bytes of a value of the KV's dtype.

        Raises:
            LostError: the memory cannot be shared.
        """
        if self._driver is None:
            return
        assert self._memory is not None, "vLLM asked for its cache"
        handle, offset = self._driver.export(self._memory)
        kept = KeptPart(handle, offset, self._memory.nbytes, part.runs(value_bytes))
        self._leader.sendall(encoded(kept_message(kept)))


def device_memory(driver: DeviceDriver, num_bytes: int) -> Tensor:
    """Allocates memory of a device: [bytes] uint8 of zeros.

    Raises:
        ConfigError: the device has not as much.
    """
    try:
        return driver.zeros(num_bytes)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"KV blocks take {num_bytes / (1 << 30):.2f} GiB, and {driver.device} has less free "
            "memory: use fewer blocks"
        ) from error
