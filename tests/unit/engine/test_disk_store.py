"""A disk is read and written in its own order, whatever order blocks are asked for in; and when it
stalls."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvmesh.core.types import BlockHash
from kvmesh.engine import disk_store
from kvmesh.engine.block_file import BlockFile
from kvmesh.engine.copier import Copier, InlineCopier
from kvmesh.engine.disk_store import NUM_PIECES, DiskStore
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.host_memory import HostMemory
from kvmesh.engine.tier_stores import Good
from kvmesh.kv.tiers import Copy
from tests.late_copier import LateCopier, LateTimers

BLOCK_BYTES, NUM_BLOCKS = 4096, 32
PLACES = random.Random(5).sample(range(NUM_BLOCKS), NUM_BLOCKS)
"""Of each block: a prefix that follows evicted ones lies as they did."""


def content(block: int) -> bytes:
    return random.Random(block).randbytes(BLOCK_BYTES)


class Disk:
    """A store with a pool of blocks that were written to it and then cleared.

    Args:
        piece: blocks that are read or written at a time.
        reads: makes the calls to the file, after the pool was written.
    """

    def __init__(self, folder: Path, piece: int = NUM_BLOCKS, reads: Copier | None = None) -> None:
        self.memory = HostMemory(NUM_BLOCKS, BLOCK_BYTES)
        self.arena = HostArena(self.memory, BLOCK_BYTES, NUM_PIECES * piece)
        self.path = folder / "w.kv"
        file = BlockFile(self.path, "model", BLOCK_BYTES, NUM_BLOCKS)
        copier, passage = InlineCopier(), range(self.arena.num_places)
        store = DiskStore(file, self.arena, passage, copier, copier)
        self.memory.view[:] = b"".join(map(content, range(NUM_BLOCKS)))
        copies = [Copy(BlockHash(bytes([n]) * 16), place) for n, place in enumerate(PLACES)]
        done: list[Good] = []
        for first in range(0, NUM_BLOCKS, piece):
            span = range(first, first + piece)
            store.save(span, copies[first:][:piece], lambda: [True] * piece, done.append)
        assert all(map(all, done))
        self.memory.view[:] = bytes(len(self.memory.view))
        self.store = DiskStore(file, self.arena, passage, copier, reads or copier)

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


def test_a_load_that_waits_for_the_loads_before_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers, late = LateTimers(), LateCopier()
    loop = SimpleNamespace(get_running_loop=lambda: timers)
    monkeypatch.setattr(disk_store, "asyncio", loop)
    disk = Disk(tmp_path, piece=4, reads=late)
    done: list[Good] = []
    for _ in range(2):
        disk.store.load(PLACES, range(NUM_BLOCKS), done.append)
    while late.jobs:
        before = list(timers.waiting)
        late.run_one()
        assert not set(before) & set(timers.waiting), "the disk has answered"
    assert done == [[True] * NUM_BLOCKS] * 2
    assert not timers.waiting
    disk.store.close()


def test_a_disk_that_stalls_ends_every_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers, late = LateTimers(), LateCopier()
    loop = SimpleNamespace(get_running_loop=lambda: timers)
    monkeypatch.setattr(disk_store, "asyncio", loop)
    disk = Disk(tmp_path, piece=4, reads=late)
    done: list[Good] = []
    for _ in range(2):
        disk.store.load(PLACES, range(NUM_BLOCKS), done.append)
    late.run_one()
    timers.go_off()
    assert [sum(good) for good in done] == [4, 0]
    late.catch_up()  # what it was told to read before
    assert len(done) == 2
    disk.store.load(PLACES, range(NUM_BLOCKS), done.append)
    late.catch_up()
    assert done[2] == [True] * NUM_BLOCKS
    assert not timers.waiting
    disk.store.close()
