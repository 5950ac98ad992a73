"""Blocks of a CUDA pool through pinned memory and channels, against a pool on the host."""

from __future__ import annotations

import pytest
import torch

from kvmesh.core.types import KvLayout
from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.engine.kv_cache import KvPool, allocate_pool
from kvmesh.transfer.device import pieces_of
from kvmesh.transfer.frames import BlockPart
from kvmesh.transfer.memory import create_shared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
LAYOUT = KvLayout("f", "bfloat16", block_size=16, num_layers=4, num_kv_heads=2, head_dim=64)
BLOCK = LAYOUT.block_bytes
NUM_BLOCKS = 64


def filled(device: str) -> KvPool:
    pool = allocate_pool(LAYOUT, NUM_BLOCKS, device)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, dtype=torch.float32).bfloat16())
    torch.cuda.synchronize()
    return pool


@pytest.mark.parametrize("part", [None, BlockPart(4096, 8192), BlockPart(3, 7)])
def test_blocks_go_through_pinned_memory_unchanged(part: BlockPart | None) -> None:
    source, target = filled("cuda"), allocate_pool(LAYOUT, NUM_BLOCKS, "cuda")
    assert isinstance(source, DeviceKvPool)
    assert isinstance(target, DeviceKvPool)
    _, memory = create_shared("test", NUM_BLOCKS * BLOCK)
    view = memoryview(memory)
    pieces = pieces_of([(40, 3), (7, 1), (9, 1)], BLOCK, part)
    staging = source.staging(view)
    staging.gather(pieces, BLOCK, pieces.size, source.moment())
    staging.close()
    staging = target.staging(view)
    staging.scatter(BLOCK, pieces, target.moment())
    staging.close()
    offset, size = part or (0, BLOCK)
    for block in (40, 41, 42, 7, 9):
        there = bytes(source.read_view(block, 1))[offset : offset + size]
        assert bytes(target.read_view(block, 1))[offset : offset + size] == there


def test_a_gather_waits_for_what_a_step_writes() -> None:
    pool = allocate_pool(LAYOUT, NUM_BLOCKS, "cuda")
    assert isinstance(pool, DeviceKvPool)
    _, memory = create_shared("test", NUM_BLOCKS * BLOCK)
    view = memoryview(memory)
    staging = pool.staging(view)
    # Clock cycles: a tenth of a second before the write.
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    pool.tensor.fill_(1.5)
    pool.computed()
    staging.gather(pieces_of([(0, NUM_BLOCKS)], BLOCK, None), 0, BLOCK, pool.moment())
    staging.close()
    assert torch.frombuffer(view, dtype=torch.bfloat16).eq(1.5).all()


def test_a_moment_is_past_when_what_was_launched_before_it_is_done() -> None:
    pool = allocate_pool(LAYOUT, NUM_BLOCKS, "cuda")
    assert isinstance(pool, DeviceKvPool)
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    pool.computed()
    moment = pool.moment()
    assert not pool.is_past(moment)
    torch.cuda.synchronize()
    assert pool.is_past(moment)
