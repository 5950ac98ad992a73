"""KV in a store outside of the mesh, which workers of several meshes and machines may share.

It is the lowest tier. A worker stores a block there after it was copied to host memory, unless the
store has it already. Missing blocks of a prefix are read into host memory, and from there into the
pool like other copies in that tier. The store is queried when a prompt needs it, without an index.
A failing store costs only recomputation. Tests: tests/integration/test_outside_store.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

from kvmesh.core.clock import Clock
from kvmesh.core.errors import LostError
from kvmesh.core.types import BlockHash
from kvmesh.engine.tier_stores import Good
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.prefix_room import PrefixRooms
from kvmesh.kv.tiers import Copy, Tiers, TierStatistics
from kvmesh.policy.linear_time import LinearTime
from kvmesh.policy.prefix_source import MIN_FETCH_TOKENS, Way, cheapest_way
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

NAME = "outside"

PIECE_BYTES = 4 << 20
"""Maximum bytes of one call, which are in memory twice during it."""

PIECE_BLOCKS = 256
"""Maximum blocks of one call, because small blocks cost more event-loop time than bytes."""

CALL_S, BYTES_PER_S = 0.002, 0.5e9
"""Assumed of the store before a read was measured."""

PAUSE_S = 5.0
"""Seconds without calls after a failure of the store."""

_HOST = 0


class OutsideStore(Protocol):
    """Four calls to a store of blocks by name. All raise `LostError` if the store failed."""

    async def has(self, keys: Sequence[BlockHash]) -> list[bool]:
        """Returns per name whether the store has a block."""
        ...

    async def get(self, keys: Sequence[BlockHash], into: Sequence[memoryview]) -> Good:
        """Copies blocks into memory, each a block in size; returns per block whether it is intact.

        Writes nothing into the memory after it has ended, also if it is cancelled.
        """
        ...

    async def put(self, keys: Sequence[BlockHash], blocks: Sequence[memoryview]) -> None:
        """Stores blocks, which do not change until it has ended."""
        ...

    async def close(self) -> None:
        """Closes all connections."""
        ...


class OutsideCache:
    """A worker's view of a store outside of the mesh.

    Args:
        tiers: bookkeeping of the tiers; the first one is host memory.
        host: returns the memory of places in host memory.
        compute_s: estimates the seconds to compute a number of blocks; 0 if unknown.
    """

    def __init__(
        self,
        store: OutsideStore,
        pool: BlockPool,
        rooms: PrefixRooms,
        tiers: Tiers,
        host: Callable[[Sequence[int]], list[memoryview]],
        block_bytes: int,
        compute_s: Callable[[int], float],
        clock: Clock,
    ) -> None:
        self._store = store
        self._pool = pool
        self._rooms = rooms
        self._tiers = tiers
        self._host = host
        self._at_once = max(1, min(PIECE_BYTES // block_bytes, PIECE_BLOCKS))
        self._compute_s = compute_s
        self._clock = clock
        self._speed: LinearTime | None = None  # not measured yet
        self._first_speed = LinearTime(CALL_S, block_bytes / BYTES_PER_S)
        self._no_get_before = 0.0
        # One prefix at a time: two requests for the same one would read it twice.
        self._turn = asyncio.Lock()
        self._is_putting = False
        self._waiting: dict[BlockHash, None] = {}  # oldest first
        self._wake = asyncio.Event()
        self._stored = self._loaded = self._lost = 0

    # --- down --------------------------------------------------------------------------------

    def offer(self, keys: Iterable[BlockHash]) -> None:
        """Queues blocks that have just come into host memory for storing."""
        self._waiting.update(dict.fromkeys(keys))
        while len(self._waiting) > self._tiers[_HOST].num_places:
            del self._waiting[next(iter(self._waiting))]  # evicted from host memory long ago
        self._wake.set()

    async def run(self) -> None:
        """Stores queued blocks, until cancelled."""
        while True:
            self._wake.clear()
            while self._waiting:
                try:
                    await self._put_next()
                except LostError as error:
                    log.warning("outside_not_written", error=str(error), pause_s=PAUSE_S)
                    await asyncio.sleep(PAUSE_S)
            await self._wake.wait()

    async def _put_next(self) -> None:
        host = self._tiers[_HOST]
        keys = list(islice(self._waiting, self._at_once))
        for key in keys:
            del self._waiting[key]
        copies = [host.begin_read(key) for key in keys if key in host]
        self._is_putting = True
        try:
            is_there = await self._store.has([copy.key for copy in copies])
            new = [copy for copy, has in zip(copies, is_there, strict=True) if not has]
            if new:
                views = self._host([copy.place for copy in new])
                await self._store.put([copy.key for copy in new], views)
                self._stored += len(new)
        finally:
            self._is_putting = False
            for copy in copies:
                host.end_read(copy, is_good=True)

    # --- up ----------------------------------------------------------------------------------

    def may_have(self, hashes: Sequence[BlockHash]) -> bool:
        """Returns whether it is worth asking the store for the rest of a prefix.

        Args:
            hashes: hashes of the blocks that may come from a cache, from the first one on.
        """
        if self._clock.now() < self._no_get_before:
            return False
        lacking = len(hashes) - self._rooms.resumable(hashes)
        return lacking * self._pool.block_size >= MIN_FETCH_TOKENS

    async def bring(self, hashes: Sequence[BlockHash]) -> None:
        """Copies a prefix's blocks that only the store has into host memory, if that is faster
        than computing them.
        """
        async with self._turn:
            if not self.may_have(hashes):
                return
            try:
                copies = await self._begin(hashes)
                await self._get(copies)
            except LostError as error:
                log.warning("outside_not_read", error=str(error), pause_s=PAUSE_S)
                self._no_get_before = self._clock.now() + PAUSE_S

    async def _begin(self, hashes: Sequence[BlockHash]) -> list[Copy]:
        """Finds the blocks to read, and takes places in host memory for them."""
        lacking = self._rooms.lacking(hashes)
        found = await self._store.has(lacking)
        there = {key for key, has in zip(lacking, found, strict=True) if has}
        held, length = self._rooms.resumable(hashes), self._rooms.resumable(hashes, there)
        if length <= held or not self._pays(length - held):
            return []
        names = self._rooms.missing(hashes, 0, length)
        for key in reversed(names):
            self._tiers.left(key)  # blocks in host memory must not be evicted for the rest
        return self._tiers.begin_write(_HOST, (key for key in names if key in there))

    def _pays(self, num_blocks: int) -> bool:
        compute_s = self._compute_s(num_blocks)
        if self._speed is None or not compute_s:
            return True
        load_s = self._speed.estimate_s(1, num_blocks)
        if cheapest_way(compute_s, None, None, load_s)[0] is Way.LOAD:
            return True
        # One slow read must not decide forever: see `TieredCache.pays`.
        self._speed = self._speed.without_call()
        return False

    async def _get(self, copies: Sequence[Copy]) -> None:
        """Fills places; frees those that could not be filled, also after an error."""
        began, num_ended = self._clock.now(), 0
        try:
            for first in range(0, len(copies), self._at_once):
                piece = copies[first : first + self._at_once]
                views = self._host([copy.place for copy in piece])
                good = await self._store.get([copy.key for copy in piece], views)
                num_ended += len(piece)
                for copy, is_good in zip(piece, good, strict=True):
                    self._ended(copy, is_good=is_good)
        finally:
            for copy in copies[num_ended:]:
                self._ended(copy, is_good=False)
        if copies:
            speed = self._speed or self._first_speed
            self._speed = speed.with_sample(len(copies), self._clock.now() - began)

    def _ended(self, copy: Copy, *, is_good: bool) -> None:
        self._tiers.end_write(_HOST, copy, is_good=is_good)
        self._loaded += is_good
        self._lost += not is_good
        if is_good:
            self._pool.came_below(copy.key)

    # --- state -------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no call to the store is under way."""
        return not (self._turn.locked() or self._is_putting)

    async def close(self) -> None:
        """Closes the store."""
        await self._store.close()

    def statistics(self) -> TierStatistics:
        """Counts of stored and read blocks; the number of blocks in the store is unknown."""
        return TierStatistics(NAME, 0, 0, self._stored, self._loaded, 0, self._lost)
