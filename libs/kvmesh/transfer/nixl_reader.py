"""The receiving side of NIXL: reads granted blocks out of a peer's registered pool.

One process per connection. A read that is cut, stalls or fails ends by killing its process, and
the grant ends only after that: then no byte of it can arrive any more. A peer's metadata is given
to the engine after a first claim of that peer was found right, never before.
Tests: tests/contract/test_channels.py, tests/integration/test_nixl.py.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Sequence

import numpy as np

from kvmesh.core.errors import LostError
from kvmesh.transfer.frames import BlockPart, PullRun, SegmentOffer
from kvmesh.transfer.memory import MappablePool, PoolMemory
from kvmesh.transfer.native import address_of
from kvmesh.transfer.nixl_child import ADDRESS, ATTACH, READ
from kvmesh.transfer.nixl_process import EngineError, NixlProcess, is_installed

ENGINE = "nixl"
MAX_READERS = 32
"""Processes of one worker; peers beyond that use the next kind of channel."""
_LOOK_S = 0.1
"""How often a read looks whether somebody still waits for it."""

Range = tuple[int, int]
"""First byte and number of bytes."""


def paired(targets: Sequence[Range], sources: Sequence[Range]) -> list[tuple[int, int, int]]:
    """Cuts two lists of ranges of the same total at each other's borders.

    Returns:
        (target, source, number of bytes), in order.
    """
    pairs: list[tuple[int, int, int]] = []
    left = iter(sources)
    source = size = 0
    for start, num_bytes in targets:
        target, end = start, start + num_bytes
        while target < end:
            if size == 0:
                source, size = next(left)
            count = min(end - target, size)
            pairs.append((target, source, count))
            target, source, size = target + count, source + count, size - count
    assert size == 0, "as many bytes on both sides"
    return pairs


def source_ranges(runs: Sequence[PullRun], part: BlockPart | None, block_bytes: int) -> list[Range]:
    """Where the blocks of a PULL are in the sender's pool."""
    if part is None:
        return [(run.source * block_bytes, run.count * block_bytes) for run in runs]
    return [
        ((run.source + index) * block_bytes + part.offset, part.size)
        for run in runs
        for index in range(run.count)
    ]


class NixlReader:
    """Reads from one connection's peer, one read at a time."""

    def __init__(
        self, process: NixlProcess, segment: SegmentOffer, pool: memoryview, timeout_s: float
    ) -> None:
        """Use `NixlReaders.open`."""
        self._process = process
        self._segment = segment
        self._base = address_of(pool)
        self._num_bytes = pool.nbytes
        self._timeout_s = timeout_s
        self._is_attached = False

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self._process.is_alive

    async def read(
        self, views: Sequence[memoryview], sources: Sequence[Range], is_cut: Callable[[], bool]
    ) -> None:
        """Fills views of this worker's pool; when it returns or raises, nobody writes them.

        Args:
            sources: offsets in the peer's pool.
            is_cut: whether nobody waits for the read any more.

        Raises:
            LostError: it was cut.
            EngineError: the engine failed, or took too long.
        """
        targets = [(address_of(view) - self._base, view.nbytes) for view in views]
        for start, size in targets:
            assert 0 <= start <= start + size <= self._num_bytes, "grants are in the pool"
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
            raise

    def kill(self) -> None:
        """Ends it soon; no read is under way."""
        self._process.kill()

    async def close(self) -> None:
        """Ends it; afterwards nobody writes this worker's pool for it. May be called again."""
        await self._process.killed()

    async def _work(self, ranges: list[tuple[int, int, int]]) -> None:
        if not self._is_attached:
            await self._process.answer()  # READY
            address = ADDRESS.pack(self._segment.address)
            await self._process.ask(ATTACH, address + self._segment.metadata)
            self._is_attached = True
        await self._process.ask(READ, np.array(ranges, dtype=np.uint64).tobytes())


class NixlReaders:
    """The readers of one worker."""

    def __init__(self, memory: PoolMemory | None, timeout_s: float) -> None:
        """Nothing is started.

        Args:
            memory: this worker's pool; what is granted lies in it.
        """
        self._memory = memory
        self._timeout_s = timeout_s
        self._readers: set[NixlReader] = set()

    async def open(self, segment: SegmentOffer) -> NixlReader:
        """A reader for one connection; its process comes up meanwhile.

        Raises:
            EngineError: this worker has no such engine, or no room.
        """
        memory = self._memory
        if segment.engine != ENGINE or not is_installed():
            raise EngineError(f"no {segment.engine} here")
        if memory is None or not isinstance(memory, MappablePool):
            raise EngineError("the blocks of this worker are not in host memory")
        running = [reader for reader in self._readers if reader.is_alive]
        if len(running) >= MAX_READERS:
            raise EngineError(f"{len(running)} readers are open")
        pool = memory.read_view(0, memory.num_blocks)
        process = await NixlProcess.start("read", memory.fd, pool.nbytes)
        reader = NixlReader(process, segment, pool, self._timeout_s)
        ended = [old for old in self._readers if not old.is_alive]
        self._readers.add(reader)
        for old in ended:
            await old.close()
            self._readers.discard(old)
        return reader

    async def close(self) -> None:
        """Ends all; nothing is under way. May be called again."""
        while self._readers:
            await self._readers.pop().close()


def is_hung_up(fd: int) -> bool:
    """Whether a connected socket was shut down, by its peer or from here."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(0))
