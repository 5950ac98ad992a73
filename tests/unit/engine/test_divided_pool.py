"""Blocks divided among devices: what arrives and leaves is what one device would have."""

from __future__ import annotations

import random

import pytest

from kvmesh.core.errors import LostError
from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.engine.divided_pool import BlocksPart, DividedPool
from kvmesh.transfer.device import DevicePool, SharedPool, pieces_of
from kvmesh.transfer.frames import BlockPart
from tests.device_twin import TwinDriver, TwinPool
from tests.ranked_engine import RankedRunner, device_part, rank_part, remote_part

LAYOUT = RankedRunner(1).spec.layout
BLOCK = LAYOUT.block_bytes
NUM_BLOCKS = 6
CONTENT = random.Random(4).randbytes(NUM_BLOCKS * BLOCK)
RUNS = [[(1, 4)], [(4, 2), (0, 1), (2, 1)]]
PARTS = [None, BlockPart(0, BLOCK // 4), BlockPart(BLOCK // 2 - 40, 84), BlockPart(3, 7)]


def divided(
    tensor_parallel: int, stages: int, *, on_hosts: bool = False
) -> tuple[DividedPool, list[TwinDriver]]:
    """A pool and the devices of its parts; `on_hosts`: all but the first are on other hosts."""
    drivers = [TwinDriver() for _ in range(tensor_parallel * stages)]
    kept: list[BlocksPart] = []
    for rank, driver in enumerate(drivers):
        make = remote_part if rank and on_hosts else device_part
        kept.append(make(rank_part(rank, tensor_parallel, stages), NUM_BLOCKS, driver)[1])
    return DividedPool(BLOCK, NUM_BLOCKS, drivers[0], kept), drivers


def filled(tensor_parallel: int, stages: int, *, on_hosts: bool = False) -> DividedPool:
    pool, _ = divided(tensor_parallel, stages, on_hosts=on_hosts)
    pool.write_view(0, NUM_BLOCKS)[:] = CONTENT
    assert bytes(pool.read_view(0, NUM_BLOCKS)) == bytes(len(CONTENT))
    pool.written(0, NUM_BLOCKS)
    return pool


def test_it_is_a_pool_of_a_device_that_no_other_process_maps() -> None:
    pool, (_, other) = divided(2, 1)
    assert isinstance(pool, DevicePool)
    assert not isinstance(pool, SharedPool)
    assert other.num_open == 1
    pool.close()
    pool.close()
    assert other.num_open == 0


@pytest.mark.parametrize(("tensor_parallel", "stages"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("on_hosts", [False, True])
def test_bytes_are_those_of_one_device(
    tensor_parallel: int,
    stages: int,
    runs: list[tuple[int, int]],
    part: BlockPart | None,
    on_hosts: bool,
) -> None:
    pool = filled(tensor_parallel, stages, on_hosts=on_hosts)
    alone = TwinPool(LAYOUT, NUM_BLOCKS, CONTENT)
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
    pool.close()


def test_copies_wait_for_the_leaders_steps() -> None:
    pool, (leader, _) = divided(2, 1)
    staging = pool.staging(memoryview(bytearray(8 * BLOCK)))
    pool.computed()
    leader.awaited.clear()
    after = pool.moment()
    staging.gather(pieces_of([(0, 2)], BLOCK, None), 0, BLOCK, after)
    assert leader.awaited[0] == after == leader.num_marks
    leader.past = leader.num_marks - 1
    assert not pool.is_past(after)


@pytest.mark.parametrize("on_hosts", [False, True])
def test_a_lost_device_ends_a_copy_and_leaves_nothing_pinned(on_hosts: bool) -> None:
    pool, (leader, other) = divided(2, 1, on_hosts=on_hosts)
    staging = pool.staging(memoryview(bytearray(8 * BLOCK)))
    other.is_broken = True
    with pytest.raises(LostError, match="the device is gone"):
        staging.gather(pieces_of([(0, 2)], BLOCK, None), 0, BLOCK, pool.moment())
    staging.close()
    if not on_hosts:
        with pytest.raises(LostError):
            pool.staging(memoryview(bytearray(8 * BLOCK)))
    assert leader.pinned_bytes == 0
    pool.close()


def test_parts_are_all_of_a_block() -> None:
    driver = TwinDriver()
    _, part = device_part(rank_part(0, 2, 1), NUM_BLOCKS, driver)
    with pytest.raises(AssertionError):
        DividedPool(BLOCK, NUM_BLOCKS, driver, [part])


def test_a_pool_of_one_device_takes_memory_that_is_there() -> None:
    driver = TwinDriver()
    memory = driver.zeros((NUM_BLOCKS + 1) * BLOCK)
    pool = DeviceKvPool(LAYOUT, NUM_BLOCKS, driver, memory)
    memory[BLOCK] = 7
    assert bytes(pool.read_view(1, 1))[0] == 7
