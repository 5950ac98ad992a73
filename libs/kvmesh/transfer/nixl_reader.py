"""The receiving side of NIXL: reads granted blocks out of a peer's registered pool.

One process per connection. If a read is cut, stalls or fails, its process is killed, and the grant
ends only after that: then no byte of it can arrive any more. A process is started, and given a
peer's metadata, only after a claim of that peer was found right. If its first read fails, a second
process tries again.
Tests: tests/contract/test_channels.py, tests/integration/test_nixl.py.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Sequence

import numpy as np

from kvmesh.core.errors import LostError
from kvmesh.transfer.frames import SegmentOffer
from kvmesh.transfer.memory import MappablePool, PoolMemory
from kvmesh.transfer.native import address_of, ranges_of
from kvmesh.transfer.nixl_child import ADDRESS, ATTACH, READ
from kvmesh.transfer.nixl_process import EngineError, NixlProcess, is_installed
from kvmesh.transfer.run_table import Numbers

ENGINE = "nixl"
MAX_READERS = 32
"""Maximum number of processes of one worker; further peers use the next kind of channel."""
_LOOK_S = 0.1
"""Seconds between checks whether a read is still wanted."""


def paired(targets: Numbers, sources: Numbers) -> Numbers:
    """Splits two lists of ranges with the same total size at each other's boundaries.

    Args:
        targets, sources: [count, 2]: first byte and number of bytes, which is not 0.

    Returns:
        [count, 3]: target, source and number of bytes, in order.
    """
    target_ends, source_ends = np.cumsum(targets[:, 1]), np.cumsum(sources[:, 1])
    assert target_ends[-1] == source_ends[-1], "as many bytes on both sides"
    ends = np.union1d(target_ends, source_ends)
    starts = np.concatenate([[0], ends[:-1]])
    columns = []
    for ranges, range_ends in ((targets, target_ends), (sources, source_ends)):
        within = np.searchsorted(range_ends, starts, side="right")
        columns.append(ranges[within, 0] + starts - (range_ends[within] - ranges[within, 1]))
    return np.stack([*columns, ends - starts], axis=1)


class NixlReader:
    """Reads from one connection's peer, one read at a time."""

    def __init__(self, fd: int, pool: memoryview, segment: SegmentOffer, timeout_s: float) -> None:
        """Starts nothing before the first read, since a HELLO alone proves no right to read.

        Args:
            fd: memfd of this worker's pool; `pool` is its mapping in this process.
        """
        self._fd = fd
        self._base = address_of(pool)
        self._num_bytes = pool.nbytes
        self._segment = segment
        self._timeout_s = timeout_s
        self._process: NixlProcess | None = None
        self._has_read = False
        self._is_over = False

    @property
    def is_running(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.is_alive

    @property
    def is_gone(self) -> bool:
        """Whether it was ended and its process is gone."""
        return self._is_over and not self.is_running

    async def read(
        self, views: Sequence[memoryview], sources: Numbers, is_cut: Callable[[], bool]
    ) -> None:
        """Fills views of this worker's pool; nothing writes them once it has returned or raised.

        Args:
            sources: [count, 2]: offset in the peer's pool and number of bytes.
            is_cut: returns whether the read is no longer wanted.

        Raises:
            LostError: the read was cut.
            EngineError: the engine failed, or took too long.
        """
        targets = ranges_of(views).astype(np.int64) - (self._base, 0)
        assert targets[:, 0].min() >= 0, "grants are in the pool"
        assert targets.sum(axis=1).max() <= self._num_bytes, "grants are in the pool"
        work = asyncio.ensure_future(self._work(paired(targets, sources)))
        now = asyncio.get_running_loop().time
        deadline = now() + self._timeout_s
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=_LOOK_S)
                if work.done():
                    break
                if is_cut():
                    raise LostError("data channel: cut while its blocks were read")
                if now() >= deadline:
                    raise EngineError(f"no progress for {self._timeout_s:g} s")
            work.result()
        except BaseException:
            work.cancel()
            await self.close()
            await asyncio.wait({work})
            if not work.cancelled():
                work.exception()  # retrieved only: the exception that ended the read matters
            raise

    def kill(self) -> None:
        """Kills the process without waiting; no read may be under way."""
        self._is_over = True
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """Kills the process; afterwards nothing writes this worker's pool. May be called again."""
        self._is_over = True
        if self._process is not None:
            await self._process.killed()

    async def _work(self, ranges: Numbers) -> None:
        try:
            await self._try(ranges)
        except EngineError:
            # The engine rarely loses a connection that it has just made to a peer that lives. A
            # second process makes another one, after the first can write no more.
            if self._has_read or self._process is None:
                raise
            await self._process.killed()
            self._process = None
            await self._try(ranges)
        self._has_read = True

    async def _try(self, ranges: Numbers) -> None:
        if self._process is None:
            self._process = await NixlProcess.start("read", self._fd, self._num_bytes)
            await self._process.answer()  # READY
            address = ADDRESS.pack(self._segment.address)
            await self._process.ask(ATTACH, address + self._segment.metadata)
        await self._process.ask(READ, ranges.astype(np.uint64).tobytes())


class NixlReaders:
    """All NIXL readers of one worker."""

    def __init__(self, memory: PoolMemory | None, timeout_s: float) -> None:
        """Starts nothing.

        Args:
            memory: this worker's pool, which contains all granted blocks.
        """
        self._memory = memory
        self._timeout_s = timeout_s
        self._readers: set[NixlReader] = set()

    def open(self, segment: SegmentOffer) -> NixlReader:
        """Returns a reader for one connection, which kills it in the end.

        Raises:
            EngineError: this worker lacks the engine, or has too many readers.
        """
        memory = self._memory
        if segment.engine != ENGINE or not is_installed():
            raise EngineError(f"no {segment.engine} here")
        if memory is None or not isinstance(memory, MappablePool):
            raise EngineError("the blocks of this worker are not in host memory")
        self._readers = {reader for reader in self._readers if not reader.is_gone}
        num_running = sum(reader.is_running for reader in self._readers)
        if num_running >= MAX_READERS:
            raise EngineError(f"{num_running} readers are at work")
        pool = memory.read_view(0, memory.num_blocks)
        reader = NixlReader(memory.fd, pool, segment, self._timeout_s)
        self._readers.add(reader)
        return reader

    async def close(self) -> None:
        """Ends all readers; nothing may be under way. May be called again."""
        while self._readers:
            await self._readers.pop().close()


def is_hung_up(fd: int) -> bool:
    """Returns whether a connected socket was shut down, by its peer or this side."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(0))
