"""Gives vLLM the memory for its KV cache, at the moment when vLLM would allocate it.

On one host's CPUs all ranks share one pool. On devices, and on CPUs of several hosts, each rank
keeps its part of every block in memory of its own. The leader maps it, or copies over lines to
other hosts.

Tests: tests/unit/engine/test_vllm_memory.py, tests/vllm/test_ranks.py,
tests/vllm/test_rank_hosts.py.
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
from kvmesh.engine.divided_pool import BlocksPart, DevicePart, DividedPool
from kvmesh.engine.host_driver import HostDriver
from kvmesh.engine.host_memory import HostMemory
from kvmesh.engine.kv_shape import SPARE_BLOCKS
from kvmesh.engine.memory import MemoryNeed, available_bytes, require_memory
from kvmesh.engine.rank_lines import NUM_LINES
from kvmesh.engine.rank_part import RankPart
from kvmesh.engine.remote_part import PartServer, RemotePart
from kvmesh.engine.vllm_messages import (
    EngineRequest,
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


def driver_of(request: EngineRequest, local: int, make_driver: MakeDriver) -> DeviceDriver:
    """Returns the driver of the memory that a rank has for itself.

    Args:
        local: number of the rank on its host.
        make_driver: of devices.
    """
    return HostDriver() if request.device is None else make_driver(request.device + local)


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
    """The leader's part, in memory of its own.

    Args:
        request: of the engine.
        make_driver: of devices.
    """

    is_shared = False

    def __init__(
        self, request: EngineRequest, ranks: Ranks | None, make_driver: MakeDriver
    ) -> None:
        self._request = request
        self._ranks = ranks
        self._make_driver = make_driver
        self._driver = driver_of(request, 0, make_driver)
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
        num_blocks = self._request.num_blocks
        if self._ranks is None:
            return DeviceKvPool(layout, num_blocks, self._driver, self._memory)
        own = DevicePart(self._driver, self._memory, part.runs(KV_DTYPE_BYTES[layout.dtype]))
        parts: list[BlocksPart] = [own]
        for rank, message in enumerate(self._ranks.hear(), 1):
            kept = read_kept(message)
            if not kept.handle:
                parts.append(RemotePart(self._ranks.copy_lines(rank), kept.runs))
                continue
            driver = driver_of(self._request, rank, self._make_driver)
            try:
                mapped = driver.open(kept.handle, kept.offset + kept.num_bytes)
            except LostError as error:
                raise ConfigError(f"memory of rank {rank} is out of reach: {error}") from error
            parts.append(DevicePart(driver, mapped[kept.offset :], kept.runs, kept.handle))
        return DividedPool(layout.block_bytes, num_blocks, self._driver, parts)


class FollowerCache:
    """The memory of a rank other than the leader.

    Args:
        leader: the socket to it.
        driver: of the rank's memory; None: the leader's pool on the host.
        dial: opens a line for copies to a leader on another host; None: it is on this one.
    """

    def __init__(
        self,
        leader: socket.socket,
        driver: DeviceDriver | None,
        dial: Callable[[], socket.socket] | None = None,
    ) -> None:
        self._leader = leader
        self._driver = driver
        self._dial = dial
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
        """Tells the leader how it reaches this rank's part.

        Args:
            value_bytes: bytes of a value of the KV's dtype.

        Raises:
            LostError: the memory cannot be shared, or the leader is gone.
        """
        if self._driver is None:
            return
        assert self._memory is not None, "vLLM asked for its cache"
        runs, (handle, offset) = part.runs(value_bytes), (b"", 0)
        if self._dial is None:
            handle, offset = self._driver.export(self._memory)
        else:
            server = PartServer(self._driver, self._memory, runs)
            for _ in range(NUM_LINES):
                server.serve(self._dial())
        kept = KeptPart(handle, offset, self._memory.nbytes, runs)
        self._leader.sendall(encoded(kept_message(kept)))


def device_memory(driver: DeviceDriver, num_bytes: int) -> Tensor:
    """Allocates memory of a device: [bytes] uint8 of zeros.

    Raises:
        ConfigError: the device has not as much.
    """
    if driver.device.type == "cpu":
        require_memory(MemoryNeed(0, num_bytes, 0), available_bytes())
    try:
        return driver.zeros(num_bytes)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"KV blocks take {num_bytes / (1 << 30):.2f} GiB, and {driver.device} has less free "
            "memory: use fewer blocks"
        ) from error
