"""The host memory through which blocks of a device pool pass, piece by piece.

A transfer is cut into pieces in any case, and each piece takes space here. While one piece is on a
socket or is copied by a peer, the device fills or empties others. The memory is a memfd, so a peer
on the host can map it in place of the pool. Tests: tests/unit/transfer/test_staging.py.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from kvmesh.core.errors import LostError
from kvmesh.core.types import Refusal, RefusalReason
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.device import DevicePool, Moment, Pieces, pieces_of
from kvmesh.transfer.frames import BlockPart
from kvmesh.transfer.memory import PoolMemory, create_shared
from kvmesh.transfer.run_table import as_runs, numbers_of
from kvmesh.transfer.threads import run_to_end

SendMemory: TypeAlias = "PoolMemory | StagingRing"
"""Memory that a channel sends from: the pool, or the staging memory of a device pool."""

DEFAULT_STAGING_BYTES = 64 << 20
_MIN_BLOCKS = 8
_PIECES = 8
"""Minimum number of pieces that fit; one peer may hold half of them."""
_MAX_THREADS = 4
"""Maximum number of threads that wait for the device, which runs their calls in order."""


class Landing(NamedTuple):
    """Memory for pieces that arrive.

    Attributes:
        views: memory to fill, in order.
        land: copies the filled memory into the pool; raises LostError if the device fails.
    """

    views: Sequence[memoryview]
    land: Callable[[], Awaitable[None]]


class Within(NamedTuple):
    """An owner within a group. The group may hold half of the memory, a member half of that."""

    group: Hashable
    member: Hashable


class Spaces:
    """Records which blocks of the memory are taken, and by which owner. No I/O.

    An owner that holds blocks gets at most half, so that a stalled peer does not stop all others. A
    member of a group (`Within`) gets at most half of that.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: list[tuple[int, int]] = [(0, num_blocks)]  # first, count; in order
        self._held: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return sum(count for _, count in self._free)

    def may_take(self, num_blocks: int, owner: Hashable) -> bool:
        """Returns whether the owner's limit allows `num_blocks` more."""
        room = self.num_blocks
        for level in _levels(owner):
            room, held = room // 2, self._held.get(level, 0)
            if held and held + num_blocks > room:
                return False
        return True

    def take(self, num_blocks: int, owner: Hashable) -> int | None:
        """Takes consecutive free blocks; returns the first, or None if there is no such run now."""
        for index, (first, count) in enumerate(self._free):
            if count >= num_blocks:
                for level in _levels(owner):
                    self._held[level] = self._held.get(level, 0) + num_blocks
                rest = (first + num_blocks, count - num_blocks)
                self._free[index : index + 1] = [rest] if rest[1] else []
                return first
        return None

    def give_back(self, first: int, num_blocks: int, owner: Hashable) -> None:
        """Frees blocks that `take` returned."""
        index = bisect.bisect(self._free, (first, 0))
        before, after = self._free[:index], self._free[index:]
        assert not before or sum(before[-1]) <= first, "freed twice"
        assert not after or first + num_blocks <= after[0][0], "freed twice"
        for level in _levels(owner):
            self._held[level] -= num_blocks
            if self._held[level] == 0:
                del self._held[level]
        if before and sum(before[-1]) == first:
            first, num_blocks = before[-1][0], before[-1][1] + num_blocks
            before.pop()
        if after and first + num_blocks == after[0][0]:
            num_blocks += after.pop(0)[1]
        self._free = [*before, (first, num_blocks), *after]


def _levels(owner: Hashable) -> tuple[Hashable, ...]:
    return ((Within, owner.group), owner) if isinstance(owner, Within) else (owner,)


class _Wait(NamedTuple):
    """A transfer that waits for space."""

    num_blocks: int
    owner: Hashable
    came: asyncio.Future[int]

    @property
    def has_come(self) -> bool:
        return self.came.done() and not self.came.cancelled() and self.came.exception() is None


class StagingRing:
    """Staging memory of one direction of a worker, shared by its channels.

    Attributes:
        fd: its memfd, with block 0 at offset 0.
        num_blocks: number of blocks in the memfd.
        piece_bytes: maximum bytes that one piece of a transfer should take.
    """

    def __init__(self, pool: DevicePool, block_bytes: int, num_bytes: int) -> None:
        """Allocates the memory.

        Raises:
            LostError: the device cannot reach host memory.
        """
        self.num_blocks = max(_MIN_BLOCKS, num_bytes // block_bytes)
        self.piece_bytes = max(1, self.num_blocks // _PIECES) * block_bytes
        self._block_bytes = block_bytes
        self.fd, memory = create_shared("kvmesh-staging", self.num_blocks * block_bytes)
        self._view = memoryview(memory)
        self._pool = pool
        try:
            self._staging = pool.staging(self._view)
        except BaseException:
            os.close(self.fd)
            raise
        self._spaces = Spaces(self.num_blocks)
        self._waiting: deque[_Wait] = deque()
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "kv-device")
        self._idle = asyncio.Event()
        self._closed = False

    def moment(self) -> Moment:
        """Returns the device's present moment.

        A transfer takes it as it begins, so that its last piece does not wait for newer steps.
        """
        return self._pool.moment()

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory."""
        return self.num_blocks * self._block_bytes

    def refusal(self, num_bytes: int) -> Refusal | None:
        """Returns why `num_bytes` cannot be staged at once; None if they can."""
        if num_bytes <= self.num_bytes:
            return None
        text = f"{num_bytes} bytes at once for {self.num_bytes} of staging"
        return Refusal(RefusalReason.INVALID, text)

    @property
    def num_free(self) -> int:
        """Number of free blocks of the memory."""
        return self._spaces.num_free

    @contextlib.asynccontextmanager
    async def landing(self, pieces: Pieces, owner: Hashable) -> AsyncIterator[Landing]:
        """Yields memory for arriving pieces; they land after the steps that were launched before.

        Args:
            owner: holder of the space: the side of the transfer that may stall.
        """
        after = self._pool.moment()
        async with self._space(pieces.num_bytes, owner) as at:
            views = [self._view[at : at + pieces.num_bytes]]
            scatter = partial(self._staging.scatter, at, pieces, after)
            yield Landing(views, partial(self._run, scatter))

    @contextlib.asynccontextmanager
    async def views(
        self, runs: Sequence[Run], part: BlockPart | None, after: Moment, owner: Hashable
    ) -> AsyncIterator[Sequence[memoryview]]:
        """Yields the bytes of runs of the pool, or of one part of each block.

        Args:
            after: see `moment`.
            owner: see `landing`.

        Raises:
            LostError: the device failed.
        """
        async with self.gathered(pieces_of(runs, self._block_bytes, part), after, owner) as views:
            yield views

    @contextlib.asynccontextmanager
    async def gathered(
        self, pieces: Pieces, after: Moment, owner: Hashable
    ) -> AsyncIterator[Sequence[memoryview]]:
        """Yields the bytes of pieces, in order.

        Raises:
            LostError: the device failed.
        """
        async with self._space(pieces.num_bytes, owner) as at:
            await self._run(partial(self._staging.gather, pieces, at, pieces.size, after))
            yield [self._view[at : at + pieces.num_bytes]]

    @contextlib.asynccontextmanager
    async def copied(
        self, runs: Sequence[Run], part: BlockPart | None, after: Moment, owner: Hashable
    ) -> AsyncIterator[Sequence[Run]]:
        """Yields the same runs with their blocks in the memfd in place of the pool.

        Args:
            after: see `moment`.
            owner: see `landing`.

        Raises:
            LostError: the device failed.
        """
        pieces = pieces_of(runs, self._block_bytes, part)
        async with self._space(len(pieces.starts) * self._block_bytes, owner) as at:
            begin = at + (0 if part is None else part.offset)
            await self._run(partial(self._staging.gather, pieces, begin, self._block_bytes, after))
            numbers = numbers_of(runs).copy()
            ends = np.cumsum(numbers[:, -1])
            numbers[:, 0] = at // self._block_bytes + ends - numbers[:, -1]
            yield as_runs(Run._make, numbers)

    async def _run(self, work: Callable[[], None]) -> None:
        await run_to_end(self._threads, work)

    @contextlib.asynccontextmanager
    async def _space(self, num_bytes: int, owner: Hashable) -> AsyncIterator[int]:
        """Yields the offset of `num_bytes` free bytes, which are held inside the context."""
        num_blocks = -(-num_bytes // self._block_bytes)
        assert num_blocks <= self.num_blocks, "pieces are smaller than the memory"
        if self._closed:
            raise LostError("data channels are closed")
        first = await self._turn(num_blocks, owner)
        try:
            yield first * self._block_bytes
        finally:
            self._free(first, num_blocks, owner)

    async def _turn(self, num_blocks: int, owner: Hashable) -> int:
        wait = _Wait(num_blocks, owner, asyncio.get_running_loop().create_future())
        self._waiting.append(wait)
        self._serve()
        try:
            return await wait.came
        except asyncio.CancelledError:
            if wait.has_come:
                self._free(wait.came.result(), num_blocks, owner)
            else:
                self._serve()  # tickets behind it may have been waiting for this one
            raise

    def _free(self, first: int, num_blocks: int, owner: Hashable) -> None:
        self._spaces.give_back(first, num_blocks, owner)
        self._serve()
        self._idle.set()

    def _serve(self) -> None:
        """Gives space to waiting transfers in their order; skips owners at their limit."""
        left: deque[_Wait] = deque()
        is_full = False
        for wait in self._waiting:
            if wait.came.done():  # cancelled
                continue
            if not is_full and self._spaces.may_take(wait.num_blocks, wait.owner):
                first = self._spaces.take(wait.num_blocks, wait.owner)
                if first is not None:
                    wait.came.set_result(first)
                    continue
                is_full = True
            left.append(wait)
        self._waiting = left

    async def close(self) -> None:
        """Frees the memory once all space is given back; waiting transfers get LostError.

        May be called again.
        """
        if self._closed:
            return
        self._closed = True
        for wait in self._waiting:
            if not wait.came.done():
                wait.came.set_exception(LostError("data channels are closed"))
        self._waiting.clear()
        while self.num_free < self.num_blocks:
            self._idle.clear()
            await self._idle.wait()
        self._threads.shutdown(wait=False)
        self._staging.close()
        os.close(self.fd)
