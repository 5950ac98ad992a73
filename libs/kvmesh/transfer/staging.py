"""The host memory that blocks of a device pool pass through, piece by piece.

A transfer is cut into pieces in any case; each takes space here, and while one is on a socket or is
copied by a peer, the device fills or empties others. The memory is a memfd, so that a peer on the
host can map it in place of the pool. Tests: tests/unit/transfer/test_staging.py.
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
"""What a channel sends from: the pool, or in place of a device pool what it is staged in."""

DEFAULT_STAGING_BYTES = 64 << 20
_MIN_BLOCKS = 8
_PIECES = 8
"""At least; half of them may be one peer's."""
_MAX_THREADS = 4
"""They wait for the device, which works in the order of their calls."""


class Landing(NamedTuple):
    """Memory for pieces that arrive.

    Attributes:
        views: to be filled in order.
        land: copies what was filled into the pool; raises LostError when the device fails.
    """

    views: Sequence[memoryview]
    land: Callable[[], Awaitable[None]]


class Within(NamedTuple):
    """An owner that is one of a group: half of the memory is the group's, half of that its own."""

    group: Hashable
    member: Hashable


class Spaces:
    """Which blocks of the memory are taken, and by whom. No I/O.

    Nobody who holds some gets more than half, so that a peer that stalls does not stop all others;
    no member of a group (`Within`) more than half of that.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: list[tuple[int, int]] = [(0, num_blocks)]  # first, count; in order
        self._held: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody has."""
        return sum(count for _, count in self._free)

    def may_take(self, num_blocks: int, owner: Hashable) -> bool:
        """Whether it is the owner's to take so many, if they are free."""
        room = self.num_blocks
        for level in _levels(owner):
            room, held = room // 2, self._held.get(level, 0)
            if held and held + num_blocks > room:
                return False
        return True

    def take(self, num_blocks: int, owner: Hashable) -> int | None:
        """The first of so many free blocks in a row; None when there are none now."""
        for index, (first, count) in enumerate(self._free):
            if count >= num_blocks:
                for level in _levels(owner):
                    self._held[level] = self._held.get(level, 0) + num_blocks
                rest = (first + num_blocks, count - num_blocks)
                self._free[index : index + 1] = [rest] if rest[1] else []
                return first
        return None

    def give_back(self, first: int, num_blocks: int, owner: Hashable) -> None:
        """Frees what `take` gave."""
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
    """Somebody without space."""

    num_blocks: int
    owner: Hashable
    came: asyncio.Future[int]

    @property
    def has_come(self) -> bool:
        return self.came.done() and not self.came.cancelled() and self.came.exception() is None


class StagingRing:
    """Staging memory of one direction of a worker, shared by its channels.

    Attributes:
        fd: its memfd, block 0 of it at offset 0.
        num_blocks: in the memfd.
        piece_bytes: most that one piece of a transfer should take.
    """

    def __init__(self, pool: DevicePool, block_bytes: int, num_bytes: int) -> None:
        """Takes the memory.

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
        """Now: taken when a transfer begins, so that its last piece does not wait for new steps."""
        return self._pool.moment()

    @property
    def num_bytes(self) -> int:
        """Of the memory."""
        return self.num_blocks * self._block_bytes

    def refusal(self, num_bytes: int) -> Refusal | None:
        """Why so many bytes cannot be here at once; None when they can."""
        if num_bytes <= self.num_bytes:
            return None
        text = f"{num_bytes} bytes at once for {self.num_bytes} of staging"
        return Refusal(RefusalReason.INVALID, text)

    @property
    def num_free(self) -> int:
        """Blocks of it that nobody has."""
        return self._spaces.num_free

    @contextlib.asynccontextmanager
    async def landing(self, pieces: Pieces, owner: Hashable) -> AsyncIterator[Landing]:
        """Memory for pieces that arrive; steps until now may still use them.

        Args:
            owner: whose they are, of the two sides the one that may stall.
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
        """The bytes of runs of the pool, or of a part of each of their blocks.

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
        """The bytes of pieces, in order.

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
        """The same runs with their blocks in the memfd in place of the pool.

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
        """Where so many bytes are free; held while inside."""
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
                self._serve()  # who waited behind it
            raise

    def _free(self, first: int, num_blocks: int, owner: Hashable) -> None:
        self._spaces.give_back(first, num_blocks, owner)
        self._serve()
        self._idle.set()

    def _serve(self) -> None:
        """Gives space to those who wait, in their order, passing over who has enough."""
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
        """Frees the memory once nobody holds any; who waits for some gets LostError.

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
