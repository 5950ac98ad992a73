"""A device pool on the twin: what goes through staging memory, and what else reads blocks."""

from __future__ import annotations

import random

import pytest

from kvmesh.core.errors import LostError
from kvmesh.core.types import KvLayout
from kvmesh.engine.host_arena import HostArena
from kvmesh.transfer.device import DevicePool, pieces_of
from kvmesh.transfer.frames import BlockPart
from kvmesh.transfer.memory import MappablePool
from tests.device_twin import TwinPool

LAYOUT = KvLayout("f", "float32", block_size=4, num_layers=2, num_kv_heads=3, head_dim=5)
BLOCK = LAYOUT.block_bytes
CONTENT = random.Random(3).randbytes(6 * BLOCK)


def test_it_is_a_pool_of_a_device_and_none_that_can_be_mapped() -> None:
    pool = TwinPool(LAYOUT, 6)
    assert isinstance(pool, DevicePool)
    assert not isinstance(pool, MappablePool)
    pool.close()
    pool.close()


@pytest.mark.parametrize("runs", [[(1, 4)], [(4, 2), (0, 1), (2, 1)]])
@pytest.mark.parametrize("part", [None, BlockPart(16, 48), BlockPart(3, 7)])
def test_what_is_gathered_and_scattered_is_the_same(
    runs: list[tuple[int, int]], part: BlockPart | None
) -> None:
    source, target = TwinPool(LAYOUT, 6, CONTENT), TwinPool(LAYOUT, 6)
    memory = memoryview(bytearray(8 * BLOCK))
    pieces = pieces_of(runs, BLOCK, part)
    out, into = source.staging(memory), target.staging(memory)

    out.gather(pieces, 2 * BLOCK, pieces.size, source.moment())
    into.scatter(2 * BLOCK, pieces, target.moment())

    offset, size = part or (0, BLOCK)
    wanted = bytearray(6 * BLOCK)
    for first, count in runs:
        for block in range(first, first + count):
            begin = block * BLOCK + offset
            wanted[begin : begin + size] = CONTENT[begin : begin + size]
    assert bytes(target.read_view(0, 6)) == wanted
    for each in (out, into):
        each.close()
        each.close()


def test_staging_that_the_device_refuses_is_not_left_pinned() -> None:
    pool = TwinPool(LAYOUT, 6)
    pool.driver.is_broken = True
    with pytest.raises(LostError):
        pool.staging(memoryview(bytearray(8 * BLOCK)))
    assert pool.driver.pinned_bytes == 0
    pool.close()


def test_blocks_leave_for_the_host_and_come_back() -> None:
    pool = TwinPool(LAYOUT, 6, CONTENT)
    arena = HostArena(pool, BLOCK, 4)
    places = arena.take(3)
    before = len(pool.driver.awaited)
    arena.store([5, 2, 3], places)
    assert len(pool.driver.awaited) == before + 1, "gathered blocks by one copy"
    pool.tensor.zero_()
    before = len(pool.driver.awaited)
    arena.load(places, [4, 0, 1])
    assert len(pool.driver.awaited) == before + 1, "scattered blocks by one copy"
    for to, begin in zip((0, 1, 4), (2, 3, 5), strict=True):
        assert bytes(pool.read_view(to, 1)) == CONTENT[begin * BLOCK : (begin + 1) * BLOCK]
