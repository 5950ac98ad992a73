"""A KV pool in device memory: kernels move blocks to the host through staging memory.

The host never maps the pool. Data channels gather blocks into memory that host and device share,
and scatter out of it (`transfer.device`); `read_view` copies a single run.
Tests: tests/unit/engine/test_device_pool.py, tests/gpu/test_device_pool.py.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvmesh.core.types import KvLayout
from kvmesh.engine.device_driver import DeviceDriver
from kvmesh.engine.divided_pool import DevicePart, PartsStaging
from kvmesh.engine.kv_shape import SPARE_BLOCKS, TORCH_DTYPES, PoolTensor
from kvmesh.kernels.block_ops import copy_pieces
from kvmesh.transfer.device import Moment, Pieces, SharedMemory


class MappedPeer:
    """A pool of another process (`transfer.device.PeerMemory`)."""

    def __init__(self, driver: DeviceDriver, pool: Tensor, memory: SharedMemory) -> None:
        """Maps the pool.

        Args:
            pool: [bytes] uint8, this side's memory.

        Raises:
            LostError: it cannot be mapped.
        """
        self._driver = driver
        self._pool = pool
        self._handle = memory.handle
        end = memory.offset + memory.num_bytes
        self._peer: Tensor | None = driver.open(memory.handle, end)[memory.offset :]

    def copy(self, targets: Pieces, sources: Pieces, after: Moment) -> None:
        """See `PeerMemory.copy`: one kernel, straight from block to block."""
        assert self._peer is not None, "the mapping is closed"
        assert targets.size == sources.size, "pieces fit"
        assert len(targets.starts) == len(sources.starts), "as many pieces here as there"
        peer = self._peer
        assert int(sources.starts.max()) + sources.size <= peer.nbytes, "outside of the pool"
        places = torch.from_numpy(np.stack([targets.starts, sources.starts], axis=1))
        self._driver.run(lambda: copy_pieces(self._pool, peer, places, targets.size), after)

    def close(self) -> None:
        """See `PeerMemory.close`."""
        if self._peer is not None:
            self._peer = None
            self._driver.close(self._handle)


class DeviceKvPool(PoolTensor):
    """A pool that only its device reaches (`transfer.device.DevicePool`)."""

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        driver: DeviceDriver,
        memory: Tensor | None = None,
    ) -> None:
        """Allocates the pool.

        Args:
            memory: [bytes] uint8 on the device, spare blocks included, in place of new memory.
        """
        assert num_blocks > 0, "a pool needs a block"
        self._block_bytes = layout.block_bytes
        self._driver = driver
        if memory is None:
            memory = driver.zeros((num_blocks + SPARE_BLOCKS) * layout.block_bytes)
        super().__init__(layout, num_blocks, memory.view(TORCH_DTYPES[layout.dtype]))
        # Memory of `write_view` runs, until `written` copies it to the pool.
        self._arriving: dict[tuple[int, int], Tensor] = {}
        self.computed()

    def computed(self) -> None:
        """See `KvPool.computed`."""
        self._driver.mark()

    def moment(self) -> Moment:
        """See `DevicePool.moment`."""
        return self._driver.moment()

    def is_past(self, moment: Moment) -> bool:
        """See `DevicePool.is_past`."""
        return self._driver.is_past(moment)

    def staging(self, memory: memoryview) -> PartsStaging:
        """See `DevicePool.staging`."""
        whole = DevicePart(self._driver, self._bytes, [(0, self._block_bytes)])
        return PartsStaging(self._driver, [whole], self._block_bytes, memory)

    def share(self) -> SharedMemory:
        """See `SharedPool.share`."""
        memory = self._bytes
        handle, offset = self._driver.export(memory)
        return SharedMemory(handle, offset, memory.nbytes)

    def settle(self, after: Moment) -> None:
        """See `SharedPool.settle`."""
        self._driver.run(lambda: None, after)

    def map_peer(self, memory: SharedMemory) -> MappedPeer:
        """See `SharedPool.map_peer`."""
        return MappedPeer(self._driver, self._bytes, memory)

    def read_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Returns a copy of the run as of all steps launched so far."""
        run = self._run(first_block, num_blocks)
        staged = self._host_memory(run.nbytes)
        staged.copy_(run)
        view: memoryview = staged.numpy().data
        return view

    def write_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Returns memory for the run; the pool does not change before `written`."""
        staged = self._host_memory(self._run(first_block, num_blocks).nbytes)
        self._arriving[first_block, num_blocks] = staged
        view: memoryview = staged.numpy().data
        return view

    def written(self, first_block: int, num_blocks: int) -> None:
        """Copies a filled `write_view` of exactly this run into the pool."""
        self._run(first_block, num_blocks).copy_(self._arriving.pop((first_block, num_blocks)))

    def close(self) -> None:
        """See `KvPool.close`. The holders of staging memory close it themselves."""
        self._tensor = None
        self._arriving.clear()

    @property
    def _bytes(self) -> Tensor:
        return self.tensor.view(torch.uint8).view(-1)

    def _run(self, first_block: int, num_blocks: int) -> Tensor:
        assert 0 <= first_block <= first_block + num_blocks <= self._num_blocks
        return self.tensor[first_block : first_block + num_blocks].view(torch.uint8).view(-1)

    def _host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.tensor.is_cuda)
