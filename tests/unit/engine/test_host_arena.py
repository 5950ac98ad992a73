from __future__ import annotations

import random

import pytest

from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.host_memory import HostMemory

BLOCK_BYTES = 24


class CountedMemory(HostMemory):
    """Notes the longest run that was asked for."""

    longest = 0

    def read_view(self, first_block: int, num_blocks: int) -> memoryview:
        self.longest = max(self.longest, num_blocks)
        return super().read_view(first_block, num_blocks)

    def write_view(self, first_block: int, num_blocks: int) -> memoryview:
        self.longest = max(self.longest, num_blocks)
        return super().write_view(first_block, num_blocks)


@pytest.mark.parametrize(("copy_bytes", "most"), [(3 * BLOCK_BYTES + 1, 3), (1, 1)])
def test_long_runs_are_copied_in_pieces(copy_bytes: int, most: int) -> None:
    memory = CountedMemory(16, BLOCK_BYTES)
    content = random.Random(2).randbytes(16 * BLOCK_BYTES)
    memory.view[:] = content
    arena = HostArena(memory, BLOCK_BYTES, 10, copy_bytes)
    places = arena.take(10)
    arena.store([*range(8), 12, 13], places)
    memory.view[:] = bytes(len(content))
    arena.load(places, range(2, 12))
    assert memory.longest == most
    wanted = content[: 8 * BLOCK_BYTES] + content[12 * BLOCK_BYTES : 14 * BLOCK_BYTES]
    assert bytes(memory.view[2 * BLOCK_BYTES : 12 * BLOCK_BYTES]) == wanted
    memory.close()


def test_blocks_come_back_as_they_were() -> None:
    memory = HostMemory(16, BLOCK_BYTES)
    content = random.Random(1).randbytes(16 * BLOCK_BYTES)
    memory.view[:] = content
    arena = HostArena(memory, BLOCK_BYTES, 10)
    blocks, others = [3, 4, 5, 11, 0], [9, 10]
    places, more = arena.take(len(blocks)), arena.take(len(others))
    arena.store(blocks, places)
    arena.store(others, more)
    assert arena.num_free == 3
    memory.view[:] = bytes(len(content))
    # To other blocks, in another order of runs.
    arena.load(places, [0, 1, 8, 7, 6])
    arena.load(more, [15, 14])
    for here, there in zip([*blocks, *others], [0, 1, 8, 7, 6, 15, 14], strict=True):
        wanted = content[here * BLOCK_BYTES : (here + 1) * BLOCK_BYTES]
        assert bytes(memory.read_view(there, 1)) == wanted
    arena.free(places)
    arena.free(more)
    assert arena.num_free == 10
    memory.close()
