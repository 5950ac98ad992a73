"""Blocks divided among devices: what arrives and leaves is what one device would have."""

from __future__ import annotations

import random

import pytest

from kvmesh.core.errors import LostError
from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.engine.divided_pool import DevicePart, DividedPool
from kvmesh.transfer.device import DevicePool, SharedPool, pieces_of
from kvmesh.transfer.frames import BlockPart
from tests.device_twin import TwinDriver, TwinPool
from tests.ranked_engine import RankedRunner, device_part, rank_part

LAYOUT = RankedRunner(1).spec.layout
BLOCK = LAYOUT.block_bytes
NUM_BLOCKS = 6
CONTENT = random.Random(4).randbytes(NUM_BLOCKS * BLOCK)
RUNS = [[(1, 4)], [(4, 2), (0, 1), (2, 1)]]
PARTS = [None, BlockPart(0, BLOCK // 4), BlockPart(BLOCK // 2 - 40, 84), BlockPart(3, 7)]


def divided(tensor_parallel: int, stages: int) -> tuple[DividedPool, list[DevicePart]]:
    count = tensor_parallel * stages
    kept = [
        device_part(rank_part(rank, tensor_parallel, stages), NUM_BLOCKS) for rank in range(count)
    ]
    return DividedPool(BLOCK, NUM_BLOCKS, kept), kept


def filled(tensor_parallel: int, stages: int) -> DividedPool:
    pool, _ = divided(tensor_parallel, stages)
    pool.write_view(0, NUM_BLOCKS)[:] = CONTENT
    assert bytes(pool.read_view(0, NUM_BLOCKS)) == bytes(len(CONTENT))
    pool.written(0, NUM_BLOCKS)
    return pool


def test_it_is_a_pool_of_a_device_that_no_other_process_maps() -> None:
    pool, kept = divided(2, 1)
    assert isinstance(pool, DevicePool)
    assert not isinstance(pool, SharedPool)
    other = kept[1].driver
    assert isinstance(other, TwinDriver)
    assert other.num_open == 1
    pool.close()
    pool.close()
    assert other.num_open == 0


@pytest.mark.parametrize(("tensor_parallel", "stages"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("part", PARTS)
def test_bytes_are_those_of_one_device(
    tensor_parallel: int, stages: int, runs: list[tuple[int, int]], part: BlockPart | None
) -> None:
    pool, alone = filled(tensor_parallel, stages), TwinPool(LAYOUT, NUM_BLOCKS, CONTENT)
    assert bytes(pool.read_view(2, 3)) == CONTENT[2 * BLOCK : 5 * BLOCK]
    pieces = pieces_of(runs, BLOCK, part)
    stride, at = pieces.size + 24, 2 * BLOCK
    gathered, scattered = [], []
    for each in (pool, alone):
        memory = memoryview(bytearray(10 * BLOCK))
        staging = each.staging(memory)
        staging.gather(pieces, at, stride, each.moment())
        gathered.append(bytes(memory))
        memory[:] = random.Random(5).randbytes(len(memory))
        staging.scatter(at, pieces, each.moment())
        scattered.append(bytes(each.read_view(0, NUM_BLOCKS)))
        staging.close()
        staging.close()
    assert gathered[0] == gathered[1]
    assert scattered[0] == scattered[1] != CONTENT


def test_copies_wait_for_the_leaders_steps() -> None:
    pool, kept = divided(2, 1)
    leader = kept[0].driver
    assert isinstance(leader, TwinDriver)
    staging = pool.staging(memoryview(bytearray(8 * BLOCK)))
    pool.computed()
    leader.awaited.clear()
    after = pool.moment()
    staging.gather(pieces_of([(0, 2)], BLOCK, None), 0, BLOCK, after)
    assert leader.awaited[0] == after == leader.num_marks
    leader.past = leader.num_marks - 1
    assert not pool.is_past(after)


def test_a_lost_device_ends_a_copy_and_leaves_nothing_pinned() -> None:
    pool, kept = divided(2, 1)
    leader, other = (part.driver for part in kept)
    assert isinstance(leader, TwinDriver)
    assert isinstance(other, TwinDriver)
    staging = pool.staging(memoryview(bytearray(8 * BLOCK)))
    other.is_broken = True
    with pytest.raises(LostError):
        staging.gather(pieces_of([(0, 2)], BLOCK, None), 0, BLOCK, pool.moment())
    staging.close()
    with pytest.raises(LostError):
        pool.staging(memoryview(bytearray(8 * BLOCK)))
    assert leader.pinned_bytes == 0


def test_parts_are_all_of_a_block() -> None:
    kept = device_part(rank_part(0, 2, 1), NUM_BLOCKS)
    with pytest.raises(AssertionError):
        DividedPool(BLOCK, NUM_BLOCKS, [kept])


def test_a_pool_of_one_device_takes_memory_that_is_there() -> None:
    driver = TwinDriver()
    memory = driver.zeros((NUM_BLOCKS + 1) * BLOCK)
    pool = DeviceKvPool(LAYOUT, NUM_BLOCKS, driver, memory)
    memory[BLOCK] = 7
    assert bytes(pool.read_view(1, 1))[0] == 7
