"""A disk is read and written in its own order, whatever order blocks are asked for in."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvmesh.core.types import BlockHash
from kvmesh.engine.block_file import BlockFile
from kvmesh.engine.copier import InlineCopier
from kvmesh.engine.disk_store import DiskStore, passage_places
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.host_memory import HostMemory
from kvmesh.engine.tier_stores import Good
from kvmesh.kv.tiers import Copy

BLOCK_BYTES, NUM_BLOCKS = 4096, 32
PLACES = random.Random(5).sample(range(NUM_BLOCKS), NUM_BLOCKS)
"""Of each block: a prefix that follows evicted ones lies as they did."""


def content(block: int) -> bytes:
    return random.Random(block).randbytes(BLOCK_BYTES)


class Disk:
    """A store with a pool of blocks that were written to it and then cleared."""

    def __init__(self, folder: Path) -> None:
        self.memory = HostMemory(NUM_BLOCKS, BLOCK_BYTES)
        self.arena = HostArena(self.memory, BLOCK_BYTES, passage_places(BLOCK_BYTES))
        self.path = folder / "w.kv"
        file = BlockFile(self.path, "model", BLOCK_BYTES, NUM_BLOCKS)
        copier, passage = InlineCopier(), range(self.arena.num_places)
        self.store = DiskStore(file, self.arena, passage, copier, copier)
        self.memory.view[:] = b"".join(map(content, range(NUM_BLOCKS)))
        copies = [Copy(BlockHash(bytes([n]) * 16), place) for n, place in enumerate(PLACES)]
        done: list[Good] = []
        self.store.save(range(NUM_BLOCKS), copies, lambda: [True] * NUM_BLOCKS, done.append)
        assert done == [[True] * NUM_BLOCKS]
        self.memory.view[:] = bytes(len(self.memory.view))

    def load(self) -> Good:
        done: list[Good] = []
        self.store.load(PLACES, range(NUM_BLOCKS), done.append)
        (good,) = done
        return good


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Bytes of each call of an `os` function from now on."""
    call: Callable[[int, Sequence[memoryview], int], int] = getattr(os, name)
    sizes: list[int] = []

    def count(fd: int, views: Sequence[memoryview], at: int) -> int:
        sizes.append(sum(len(view) for view in views))
        return call(fd, views, at)

    monkeypatch.setattr(os, name, count)
    return sizes


async def test_consecutive_places_are_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, read = counted(monkeypatch, "pwritev"), counted(monkeypatch, "preadv")
    disk = Disk(tmp_path)
    assert all(disk.load())
    assert written == read == [NUM_BLOCKS * BLOCK_BYTES]
    assert bytes(disk.memory.view) == b"".join(map(content, range(NUM_BLOCKS)))
    disk.store.close()


async def test_damage_is_told_of_the_block_that_has_it(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    damaged = 7
    with disk.path.open("r+b") as file:
        at = file.seek(0, os.SEEK_END) - (NUM_BLOCKS - PLACES[damaged]) * BLOCK_BYTES
        file.seek(at)
        file.write(b"damage")
    good = disk.load()
    assert [block for block, is_good in enumerate(good) if not is_good] == [damaged]
    disk.store.close()
