"""A tier on disk: places in a file. Blocks pass through host memory on their way.

Reads and writes run in a thread of their own, so that a slow disk delays no other copies. If the
disk stalls, the loads that wait for it are abandoned and their blocks count as lost. The disk may
still write to their buffers, which are reused only afterwards.
Tests: tests/unit/engine/test_disk_store.py, tests/integration/test_tiers_disk.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvmesh.engine.block_file import BlockFile
from kvmesh.engine.copier import Copier
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.tier_stores import Good
from kvmesh.kv.tiers import Copy
from kvmesh.policy.linear_time import LinearTime
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

PIECE_BYTES = 4 << 20
"""Bytes of one read; meanwhile the piece before is copied into the pool."""

DISK_CALL_S, DISK_BYTES_PER_S = 0.001, 1e9
"""Assumed of loads from disk before one was measured."""

STALL_S = 2.0
"""Seconds without any answer from the disk after which loads are abandoned and their prompts are
computed. A load that only waits for the loads before it is not abandoned."""

NUM_PIECES = 3
"""Number of buffers: one to write from, and two to read into in turn."""


def passage_places(block_bytes: int) -> int:
    """Returns the number of arena places that a store needs as buffers."""
    return NUM_PIECES * _piece_blocks(block_bytes)


def _piece_blocks(block_bytes: int) -> int:
    return max(1, PIECE_BYTES // block_bytes)


class _Load:
    """A load of places into blocks."""

    def __init__(
        self, places: Sequence[int], blocks: Sequence[int], done: Callable[[Good], None]
    ) -> None:
        self.places = places
        self.blocks = blocks
        self.good = [False] * len(places)
        self.num_left = len(places)
        self.num_copying = 0
        self.done = done
        self.is_given_up = False


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a load that one call reads: indices of its places, in their order on disk."""

    load: _Load
    indices: Sequence[int]


class DiskStore:
    """See `TierStore`; everything except copies runs on the event loop.

    Args:
        arena: host memory that blocks pass through.
        passage: places of the arena for buffers, `passage_places` of them.
        copier: copies between arena and pool.
        disk: reads and writes the file.
    """

    def __init__(
        self,
        file: BlockFile,
        arena: HostArena,
        passage: Sequence[int],
        copier: Copier,
        disk: Copier,
    ) -> None:
        self._file = file
        self._arena = arena
        self._copier = copier
        self._disk = disk
        size = self.num_at_once = len(passage) // NUM_PIECES
        self.first_speed = LinearTime(DISK_CALL_S, arena.block_bytes / DISK_BYTES_PER_S)
        self._outbound = list(passage[:size])
        self._inbound = [list(passage[at : at + size]) for at in (size, 2 * size)]
        self._waiting: deque[_Piece] = deque()
        self._open: dict[_Load, None] = {}  # in the order of their start
        self._watch: asyncio.TimerHandle | None = None

    # --- down --------------------------------------------------------------------------------

    def save(
        self,
        blocks: Sequence[int],
        copies: Sequence[Copy],
        is_same: Callable[[], Good],
        done: Callable[[Good], None],
    ) -> None:
        """See `TierStore.save`; at most `num_at_once` blocks, one call at a time."""
        buffer = self._outbound[: len(blocks)]
        self._copier.start(
            partial(self._arena.store, blocks, buffer),
            lambda: self._write_same(buffer, copies, is_same(), done),
        )

    def _write_same(
        self,
        buffer: Sequence[int],
        copies: Sequence[Copy],
        same: Good,
        done: Callable[[Good], None],
    ) -> None:
        """Writes only blocks that were not evicted while they were read."""
        kept = [index for index, is_same in enumerate(same) if is_same]
        if not kept:
            done(list(same))
            return
        places, chosen = [buffer[i] for i in kept], [copies[i] for i in kept]

        def written(good: Good) -> None:
            is_there = dict(zip(kept, good, strict=True))
            done([is_there.get(index, False) for index in range(len(copies))])

        self.spill(places, chosen, written)

    def spill(
        self, places: Sequence[int], copies: Sequence[Copy], done: Callable[[Good], None]
    ) -> None:
        """Writes places of the arena, which must not change until `done`."""
        good: Good = []

        def write() -> None:
            good.extend(self._file.write(copies, self._arena.views(places)))

        def written() -> None:
            self._answered()
            done(good)

        self._disk.start(write, written)

    # --- up ----------------------------------------------------------------------------------

    def load(
        self, places: Sequence[int], blocks: Sequence[int], done: Callable[[Good], None]
    ) -> None:
        """See `TierStore.load`."""
        load = _Load(places, blocks, done)
        # A disk reads fastest in its own order, in which places rarely are.
        order = sorted(range(len(places)), key=places.__getitem__)
        for first in range(0, len(places), self.num_at_once):
            self._waiting.append(_Piece(load, order[first : first + self.num_at_once]))
        self._open[load] = None
        if self._watch is None:
            self._answered()
        self._read_next()

    def _answered(self) -> None:
        """Waits for the disk's next answer from now on, if a load needs one."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._open:
            self._watch = asyncio.get_running_loop().call_later(STALL_S, self._give_up)

    def _give_up(self) -> None:
        self._watch = None
        num_blocks = sum(load.num_left for load in self._open)
        log.warning("tier_stalled", seconds=STALL_S, num_blocks=num_blocks)
        for load in list(self._open):
            load.is_given_up = True
            self._end_if_over(load)

    def _read_next(self) -> None:
        while self._inbound and self._waiting:
            piece = self._waiting.popleft()
            if not piece.load.is_given_up:
                self._read(piece.load, piece.indices, self._inbound.pop())

    def _read(self, load: _Load, indices: Sequence[int], buffer: list[int]) -> None:
        good: Good = []

        def read() -> None:
            places = [load.places[index] for index in indices]
            good.extend(self._file.read(places, self._arena.views(buffer[: len(places)])))

        def is_read() -> None:
            self._answered()
            if load.is_given_up:
                self._give_back(buffer)
                return
            load.num_copying += 1
            whole = [at for at, is_good in enumerate(good) if is_good]
            blocks = [load.blocks[indices[at]] for at in whole]
            copy = partial(self._arena.load, [buffer[at] for at in whole], blocks)
            self._copier.start(copy, copied)

        def copied() -> None:
            load.num_copying -= 1
            load.num_left -= len(indices)
            for index, is_good in zip(indices, good, strict=True):
                load.good[index] = is_good
            self._give_back(buffer)
            self._end_if_over(load)

        self._disk.start(read, is_read)

    def _give_back(self, buffer: list[int]) -> None:
        self._inbound.append(buffer)
        self._read_next()

    def _end_if_over(self, load: _Load) -> None:
        if load.num_copying or (load.num_left and not load.is_given_up):
            return
        del self._open[load]
        if not self._open:
            self._answered()
        load.done(load.good)

    def close(self) -> None:
        """See `TierStore.close`."""
        self._file.close()
        self._arena.close()
