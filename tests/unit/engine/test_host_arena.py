from __future__ import annotations

import random

from kvmesh.engine.fake import HostMemory
from kvmesh.engine.host_arena import HostArena

BLOCK_BYTES = 24


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
