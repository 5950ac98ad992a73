"""How fast tiers load the blocks that they hold: against memcpy, and against fio's sequential read.

Through the stores of a worker and their threads, for the KV of one prompt of the benchmark's model.
Without fio on PATH nothing says what the disk does at best, and its row has no share of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable
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

FIO_LOOPS = 8
"""Passes of fio over the file, since it counts milliseconds."""


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
    path, fio = folder / "copies.kv", shutil.which("fio")
    loaded, best = [], []
    for _ in range(blocks.repeats):
        if fio is not None:
            best.append(_sequential_read_gb_s(fio, path))
        drop_pages(path)
        loaded.append(_rate(blocks, await _load(store, blocks)))
    store.close()
    against = "no fio on PATH" if fio is None else f"{_version(fio)}, sequential read"
    return _row("disk", against, loaded, best)


def _row(tier: str, against: str, loaded: list[float], best: list[float]) -> Row:
    row: Row = {"tier": tier, "loaded_gb_s": spread(loaded, 2), "against": against}
    if best:
        row["best_gb_s"] = spread(best, 2)
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


def drop_pages(path: Path) -> None:
    """Makes the system forget what it keeps of a file, so that it is read from the disk."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _sequential_read_gb_s(fio: str, path: Path) -> float:
    """Past the system's page cache, 4 MiB a call, as much as one thread does."""
    job = ("--name=read", f"--filename={path}", "--readonly", "--rw=read", "--bs=4M")
    way = ("--direct=1", "--ioengine=psync", f"--loops={FIO_LOOPS}", "--output-format=json")
    told = subprocess.run([fio, *job, *way], capture_output=True, check=True, text=True).stdout
    return float(json.loads(told)["jobs"][0]["read"]["bw_bytes"]) / 1e9


def _version(fio: str) -> str:
    return subprocess.run(
        [fio, "--version"], capture_output=True, check=True, text=True
    ).stdout.strip()
