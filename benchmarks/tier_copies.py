"""How fast tiers give back what they hold: against memcpy, and against reading the disk in order.

Through the stores of a worker and their threads, for the KV of one prompt of the benchmark's model.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.result import Row, spread
from kvmesh.core.types import BlockHash
from kvmesh.engine.block_file import BlockFile
from kvmesh.engine.copier import ThreadCopier
from kvmesh.engine.disk_store import DiskStore, passage_places
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.host_memory import HostMemory
from kvmesh.engine.tier_stores import Good, HostStore, TierStore
from kvmesh.kv.tiers import Copy

READ_BYTES = 4 << 20
"""Of one call when the disk is read in order."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The size of a copy: a pool of `num_blocks` blocks, all of which are copied."""

    num_blocks: int
    block_bytes: int
    repeats: int
    seed: int

    @property
    def num_bytes(self) -> int:
        """Of one copy of all."""
        return self.num_blocks * self.block_bytes


def copy_rows(blocks: Blocks, folder: Path) -> list[Row]:
    """A row for each tier: bytes per second, of what the machine does at best."""
    return asyncio.run(_rows(blocks, folder))


async def _rows(blocks: Blocks, folder: Path) -> list[Row]:
    memory = HostMemory(blocks.num_blocks, blocks.block_bytes)
    memory.view[:] = random.Random(blocks.seed).randbytes(blocks.num_bytes)
    async with _copier() as copier, _copier() as disk:
        rows = [
            await _host(blocks, memory, copier),
            await _disk(blocks, memory, copier, disk, folder),
        ]
    memory.close()
    return rows


@contextlib.asynccontextmanager
async def _copier() -> AsyncIterator[ThreadCopier]:
    copier = ThreadCopier()
    task = asyncio.create_task(copier.run())
    try:
        yield copier
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _host(blocks: Blocks, memory: HostMemory, copier: ThreadCopier) -> Row:
    arena = HostArena(memory, blocks.block_bytes, blocks.num_blocks)
    store = HostStore(arena, copier)
    await _save(store, blocks)
    source, target = (np.ones(blocks.num_bytes, np.uint8) for _ in range(2))
    loaded, best = [], []
    for _ in range(blocks.repeats):
        best.append(_rate(blocks, _seconds(partial(np.copyto, target, source))))
        loaded.append(_rate(blocks, await _load(store, blocks)))
    store.close()
    return _row("host", "memcpy", loaded, best)


async def _disk(
    blocks: Blocks, memory: HostMemory, copier: ThreadCopier, disk: ThreadCopier, folder: Path
) -> Row:
    size = blocks.block_bytes
    arena = HostArena(memory, size, passage_places(size))
    file = BlockFile(folder / "copies.kv", "benchmark", size, blocks.num_blocks)
    store = DiskStore(file, arena, range(arena.num_places), copier, disk)
    await _save(store, blocks)
    loaded, best = [], []
    with _direct(folder / "copies.kv") as fd:
        os.fsync(fd)
        for _ in range(blocks.repeats):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            best.append(_rate(blocks, _seconds(partial(_read_in_order, fd, blocks.num_bytes))))
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            loaded.append(_rate(blocks, await _load(store, blocks)))
    store.close()
    return _row("disk", "read in order, O_DIRECT", loaded, best)


def _row(tier: str, against: str, loaded: list[float], best: list[float]) -> Row:
    row: Row = {
        "tier": tier,
        "loaded_gb_s": spread(loaded, 2),
        "against": against,
        "best_gb_s": spread(best, 2),
    }
    row["of_best"] = round(row["loaded_gb_s"]["median"] / row["best_gb_s"]["median"], 3)
    return row


def _rate(blocks: Blocks, seconds: float) -> float:
    return blocks.num_bytes / seconds / 1e9


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


async def _save(store: TierStore, blocks: Blocks) -> None:
    """Puts block n of the pool into place n."""
    for first in range(0, blocks.num_blocks, store.num_at_once):
        chosen = range(first, min(first + store.num_at_once, blocks.num_blocks))
        copies = [Copy(_key(block), block) for block in chosen]
        are_same = partial(_all_good, len(copies))
        good = await _done(partial(store.save, chosen, copies, are_same))
        assert all(good), "the disk takes what is written"


async def _load(store: TierStore, blocks: Blocks) -> float:
    """Seconds until all blocks are back in the pool."""
    everything = range(blocks.num_blocks)
    started = time.perf_counter()
    good = await _done(partial(store.load, everything, everything))
    seconds = time.perf_counter() - started
    assert all(good), "what was written can be read"
    return seconds


async def _done(begin: Callable[[Callable[[Good], None]], None]) -> Good:
    done: asyncio.Future[Good] = asyncio.get_running_loop().create_future()
    begin(done.set_result)
    return await done


def _all_good(count: int) -> Good:
    return [True] * count


def _key(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


@contextlib.contextmanager
def _direct(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        yield fd
    finally:
        os.close(fd)


def _read_in_order(fd: int, num_bytes: int) -> None:
    """Past the system's page cache, as `fio --rw=read --direct=1 --bs=4M` does."""
    with mmap.mmap(-1, READ_BYTES) as buffer:
        for at in range(0, num_bytes, READ_BYTES):
            os.preadv(fd, [buffer], at)
