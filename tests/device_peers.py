"""Checks of memory that a pool maps out of another process, for the twin and for CUDA."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.transfer.device import SharedMemory, pieces_of
from kvmesh.transfer.frames import BlockPart, SegmentOffer
from kvmesh.transfer.ipc_channel import ENGINE, memory_of
from tests.transfer_pair import BLOCK

NUM_BLOCKS = 8
SEED = 11


@contextmanager
def other_process(device: str) -> Iterator[tuple[SharedMemory, subprocess.Popen[str]]]:
    """A process with a pool of known content, and how it said that it is found."""
    command = [sys.executable, "-m", "tests.device_child", device, str(NUM_BLOCKS), str(SEED)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            address, metadata = child.stdout.readline().split()
            segment = SegmentOffer(ENGINE, int(address), bytes.fromhex(metadata))
            yield memory_of(segment, NUM_BLOCKS * BLOCK), child
        finally:
            child.kill()


def check_blocks_come_over(pool: DeviceKvPool, memory: SharedMemory) -> None:
    """Whole blocks and parts of blocks of the other process, and nothing beside them."""
    content = random.Random(SEED).randbytes(NUM_BLOCKS * BLOCK)
    peer = pool.map_peer(memory)
    part = BlockPart(4096, 8192)
    now = pool.moment()
    there = pieces_of([(5, 2), (1, 1)], BLOCK, None)
    peer.copy(pieces_of([(0, 1), (3, 2)], BLOCK, None), there, now)
    peer.copy(pieces_of([(2, 1)], BLOCK, part), pieces_of([(7, 1)], BLOCK, part), now)
    peer.close()
    peer.close()

    wanted = bytearray(NUM_BLOCKS * BLOCK)
    for to, begin in ((0, 5), (3, 6), (4, 1)):
        wanted[to * BLOCK : (to + 1) * BLOCK] = content[begin * BLOCK : (begin + 1) * BLOCK]
    to, begin = 2 * BLOCK + part.offset, 7 * BLOCK + part.offset
    wanted[to : to + part.size] = content[begin : begin + part.size]
    assert bytes(pool.read_view(0, NUM_BLOCKS)) == wanted
