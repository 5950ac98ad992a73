"""The worker as a member of the pool: carries out copies that the kvmanager orders, one at a time.

It also evicts copies first that other workers hold too. A copy takes free blocks, and cached blocks
that were not read for a while: the ordered prefix is hot, so it is worth more. Nobody waits for a
copy, and none is retried: the kvmanager repeats a lost order if it still helps.
Tests: tests/unit/runtime/test_pool_copies.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from kvmesh.core.clock import Clock
from kvmesh.core.pool import (
    CopyOrder,
    CopyOutcome,
    CopyResult,
    EvictionHint,
    OldestOrder,
    PoolAnswer,
    PoolOrder,
    PoolReport,
)
from kvmesh.core.types import BlockHash, Endpoint, PrefixSource, Role
from kvmesh.engine.core import EngineCore
from kvmesh.kv.oldest import evict_first, oldest_blocks
from kvmesh.policy.global_lru import MAX_OLDEST
from kvmesh.runtime.fetch_result import FetchOutcome, FetchResult
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

COLD_S = 30.0
"""Seconds without use after which a cached block makes room for a copy."""

MARK_S = 1.0
"""Resolution of COLD_S in seconds."""

MAX_WAITING = 64
"""Maximum number of waiting orders; further ones are refused."""

MAX_WAIT_S = 30.0
"""Seconds after which a waiting order is refused: its reasons are outdated."""

MAX_ROOM = 8192
"""Maximum number of blocks of room to count, to limit the cost of a report."""

Fetch = Callable[[PrefixSource, Sequence[BlockHash]], Awaitable[FetchResult]]


class PoolCopies:
    """The orders of one worker; a `PoolEnd` of the publisher.

    Args:
        endpoint: address at which this worker leases its blocks.
        role: returns the worker's present role.
        scenario: returns the present scenario of its group.
        fetch: brings a prefix from a source into the prefix cache.
        lent: returns the number of cached blocks that other workers have read here since the start.
        leaving: returns whether this worker gets no new requests and will be gone.
    """

    def __init__(
        self,
        core: EngineCore,
        endpoint: Endpoint,
        role: Callable[[], Role],
        scenario: Callable[[], str],
        fetch: Fetch,
        lent: Callable[[], int],
        leaving: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._core = core
        self._endpoint = endpoint
        self._role = role
        self._scenario = scenario
        self._fetch = fetch
        self._lent = lent
        self._leaving = leaving
        self._clock = clock
        self._waiting: deque[tuple[CopyOrder, float]] = deque()
        self._wake = asyncio.Event()
        # Pairs of a time and the pool's turn at that time, oldest first; the first is COLD_S old.
        self._marks: deque[tuple[float, int]] = deque([(clock.now(), 0)])
        self.on_answer: Callable[[PoolAnswer], None] = lambda _answer: None
        """Called with the result of each copy, and with the next evictions on request."""

    @property
    def num_waiting(self) -> int:
        """Number of copies that are not done yet, including the one in progress."""
        return len(self._waiting)

    def report(self) -> PoolReport:
        """See `PoolEnd.report`."""
        core = self._core
        used = core.statistics().cached_tokens_total // core.block_size
        return PoolReport(
            role=self._role(),
            endpoint=self._endpoint,
            block_bytes=core.spec.layout.block_bytes,
            room_blocks=self.room(MAX_ROOM),
            read_blocks_total=used + self._lent(),
            leaving=self._leaving(),
            scenario=self._scenario(),
        )

    def room(self, limit: int) -> int:
        """Number of blocks that a copy may take, at most `limit`."""
        now, marks, pool = self._clock.now(), self._marks, self._core.pool
        if now - marks[-1][0] >= MARK_S:
            marks.append((now, pool.turn))
        while len(marks) > 1 and marks[1][0] <= now - COLD_S:
            marks.popleft()
        at, turn = marks[0]
        return pool.num_room(turn if at <= now - COLD_S else 0, limit)

    def take(self, order: PoolOrder) -> None:
        """See `PoolEnd.take`."""
        if isinstance(order, EvictionHint):
            evict_first(self._core.pool, order.hashes)
        elif isinstance(order, OldestOrder):
            limit = min(order.num_blocks, MAX_OLDEST)
            self.on_answer(oldest_blocks(self._core.pool, limit))
        elif len(self._waiting) >= MAX_WAITING:
            self._tell(order, CopyOutcome.REFUSED, "busy")
        else:
            self._waiting.append((order, self._clock.now()))
            self._wake.set()

    async def run(self) -> None:
        """Carries out orders until cancelled."""
        while True:
            await self._wake.wait()
            while self._waiting:
                order, since = self._waiting[0]
                try:
                    await self._carry_out(order, self._clock.now() - since)
                finally:
                    self._waiting.popleft()
            self._wake.clear()

    async def _carry_out(self, order: CopyOrder, waited_s: float) -> None:
        refusal = self._refusal(order, waited_s)
        if refusal is not None:
            self._tell(order, CopyOutcome.REFUSED, refusal)
            return
        source = PrefixSource(
            order.source, order.source_incarnation, order.endpoint, len(order.hashes)
        )
        result = await self._fetch(source, order.hashes)
        outcome, reason = judge(result, len(order.hashes))
        self._tell(order, outcome, reason, result)

    def _refusal(self, order: CopyOrder, waited_s: float) -> str | None:
        if self._leaving():
            return "leaving"
        if waited_s > MAX_WAIT_S:
            return "late"
        missing = len(order.hashes) - len(self._core.pool.match(order.hashes))
        return "no_room" if self.room(missing) < missing else None

    def _tell(
        self,
        order: CopyOrder,
        outcome: CopyOutcome,
        reason: str,
        result: FetchResult | None = None,
    ) -> None:
        num_blocks, num_bytes = (result.num_fetched, result.num_bytes) if result else (0, 0)
        log.info(
            "copy_ordered",
            order_id=order.order_id,
            source=order.source,
            outcome=outcome.value,
            reason=reason,
            num_blocks=num_blocks,
        )
        self.on_answer(CopyResult(order.order_id, outcome, reason, num_blocks, num_bytes))


def judge(result: FetchResult, wanted: int) -> tuple[CopyOutcome, str]:
    """The outcome of an order of `wanted` blocks, from the result of its fetch."""
    if result.num_blocks >= wanted:
        return CopyOutcome.DONE, result.outcome.value
    if result.outcome in (FetchOutcome.FETCHED, FetchOutcome.SHARED, FetchOutcome.HELD):
        return CopyOutcome.FAILED, "partial"  # the source had evicted the rest
    if result.outcome is FetchOutcome.NO_ROOM:
        return CopyOutcome.REFUSED, "no_room"
    return CopyOutcome.FAILED, result.reason or result.outcome.value
