"""Channels between CUDA pools, and between them and the host, through pinned memory on a device."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kvmesh.engine.device_driver import CudaDriver
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.channel_pool import SendOptions
from kvmesh.transfer.frames import BlockPart
from tests.device_twin import FilledPool
from tests.transfer_pair import BLOCK, running_pair, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SCATTERED = [Run((7 * index) % 320, index, 1) for index in range(300)]


@pytest.mark.parametrize("kind", ["local", "shm", "tcp"])
@pytest.mark.parametrize("devices", [(True, True), (True, False), (False, True)])
async def test_blocks_land(kind: str, devices: tuple[bool, bool]) -> None:
    device_pool = partial(FilledPool, CudaDriver("cuda"))
    send = SendOptions(kinds=(kind,), staging_bytes=48 * BLOCK)
    async with running_pair(send, None, devices, device_pool) as pair:
        for runs in (whole(300), SCATTERED):
            await pair.pool.put(pair.reservation, runs)
            for run in runs:
                there = pair.source.read_view(run.source_start, run.count)
                assert pair.target.content(run.target_start, run.count) == there
        part = BlockPart(1024, 4096)
        await pair.pool.put(pair.reservation, [Run(9, 310, 2)], part)
        here = pair.target.content(310, 1)
        assert here[1024:5120] == pair.source.read_view(9, 1)[1024:5120]
        assert not any(here[:1024] + here[5120:])
