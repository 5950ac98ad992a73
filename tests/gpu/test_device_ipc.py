"""CUDA memory of another process, and channels between CUDA pools, on a device."""

from __future__ import annotations

import pytest
import torch

from kvmesh.core.errors import LostError
from kvmesh.engine.device_driver import CudaDriver
from kvmesh.engine.device_pool import DeviceKvPool
from tests.device_peers import NUM_BLOCKS, check_blocks_come_over, other_process
from tests.transfer_pair import LAYOUT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def test_blocks_of_another_process_come_over() -> None:
    pool = DeviceKvPool(LAYOUT, NUM_BLOCKS, CudaDriver("cuda"))
    with other_process("cuda") as (memory, _):
        check_blocks_come_over(pool, memory)
        check_blocks_come_over(DeviceKvPool(LAYOUT, NUM_BLOCKS, CudaDriver("cuda")), memory)
        first, second = pool.map_peer(memory), pool.map_peer(memory)
        first.close()
        second.close()


def test_a_process_that_dies_while_mapped_leaves_this_one_alive() -> None:
    pool = DeviceKvPool(LAYOUT, NUM_BLOCKS, CudaDriver("cuda"))
    with other_process("cuda") as (memory, child):
        peer = pool.map_peer(memory)
        child.kill()
        child.wait()
        peer.close()
        with pytest.raises(LostError):
            pool.map_peer(memory)
    pool.tensor.fill_(1.0)
    torch.cuda.synchronize()
