"""Blocks of a device pool through memory that both sides reach."""

import random

import pytest

from kvmesh.core.errors import LostError
from kvmesh.core.types import KvLayout
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.staged_blocks import StagedBlocks
from tests.device_twin import TwinPool

LAYOUT = KvLayout("model", "float32", 4, 2, 1, 8)
BLOCK = LAYOUT.block_bytes
CONTENT = random.Random(5).randbytes(8 * BLOCK)


def block(index: int) -> bytes:
    return CONTENT[index * BLOCK : (index + 1) * BLOCK]


@pytest.mark.parametrize("at_once", [1, 2, 3, 8])
def test_batches_are_as_long_as_the_memory(at_once: int) -> None:
    pool = TwinPool(LAYOUT, 8, CONTENT)
    staged = StagedBlocks(pool, BLOCK, at_once)
    order = [6, 1, 2, 3, 0]

    read, counts = bytearray(), list[int]()
    for count, view in staged.read(order):
        read += view
        counts.append(count)
    assert read == b"".join(map(block, order))
    assert sum(counts) == 5
    assert max(counts) == min(at_once, 5)

    left = iter(order)

    def fill(count: int, view: memoryview) -> None:
        view[:] = b"".join(block(next(left)) for _ in range(count))

    to = [7, 5, 4, 1, 0]
    staged.write(to, fill)
    for there, here in zip(to, order, strict=True):
        assert bytes(pool.read_view(there, 1)) == block(here)

    staged.close()
    staged.close()
    assert pool.driver.pinned_bytes == 0
    pool.close()


def test_an_arena_pins_no_more_than_it_copies_at_once_and_gives_it_back() -> None:
    pool = TwinPool(LAYOUT, 8, CONTENT)
    arena = HostArena(pool, BLOCK, 6, copy_bytes=2 * BLOCK)
    assert pool.driver.pinned_bytes == 2 * BLOCK, "there is room for it now"
    places = arena.take(5)
    arena.store([7, 0, 2, 4, 6], places)
    assert pool.driver.pinned_bytes == 2 * BLOCK
    arena.load(places, [0, 1, 2, 3, 5])
    for there, here in zip([0, 1, 2, 3, 5], [7, 0, 2, 4, 6], strict=True):
        assert bytes(pool.read_view(there, 1)) == block(here)
    arena.close()
    arena.close()
    assert pool.driver.pinned_bytes == 0
    pool.close()


def test_a_device_without_room_is_known_before_anything_is_copied() -> None:
    pool = TwinPool(LAYOUT, 8, CONTENT)
    pool.driver.is_broken = True
    with pytest.raises(LostError):
        HostArena(pool, BLOCK, 6)
    assert pool.driver.pinned_bytes == 0
    pool.close()


def test_a_device_that_fails_is_an_error_of_the_copy() -> None:
    pool = TwinPool(LAYOUT, 8, CONTENT)
    staged = StagedBlocks(pool, BLOCK, 2)
    pool.driver.is_broken = True
    with pytest.raises(LostError):
        next(staged.read([1]))
    staged.close()
    pool.close()
