"""PoolCopies over a real engine core: what is carried out, what is refused, what is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from kvmesh.core.clock import ManualClock
from kvmesh.core.pool import (
    CopyOrder,
    CopyOutcome,
    CopyResult,
    EvictionHint,
    OldBlocks,
    OldestOrder,
    PoolAnswer,
)
from kvmesh.core.types import BlockHash, Endpoint, PrefixSource, Role, WorkerId
from kvmesh.engine.core import EngineCore
from kvmesh.engine.fake import FakeRunner
from kvmesh.runtime import pool_copies
from kvmesh.runtime.fetch_result import FetchOutcome, FetchResult
from kvmesh.runtime.pool_copies import PoolCopies, judge

NUM_BLOCKS = 8


def names(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(number.to_bytes(16, "big")) for number in numbers)


def copy_order(label: str, *numbers: int) -> CopyOrder:
    return CopyOrder(label, WorkerId("source"), 7, Endpoint("h", 1), names(*numbers))


class Stage:
    """A worker's cache, with fetches that the test lets end."""

    def __init__(self) -> None:
        runner = FakeRunner(num_blocks=NUM_BLOCKS)
        self.core = EngineCore(runner.spec, NUM_BLOCKS)
        self.clock = ManualClock()
        self.leaving = False
        self.lent = 0
        self.asked: list[tuple[PrefixSource, tuple[BlockHash, ...]]] = []
        self.results: asyncio.Queue[CopyResult] = asyncio.Queue()
        self.fetched = FetchResult(FetchOutcome.FETCHED, 2, 2, 2000)
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.copies = PoolCopies(
            self.core,
            Endpoint("here", 2),
            lambda: Role.PREFILL,
            lambda: "chat",
            self._fetch,
            lambda: self.lent,
            lambda: self.leaving,
            self.clock,
        )
        self.answers: list[PoolAnswer] = []
        self.copies.on_answer = self._answered

    def _answered(self, answer: PoolAnswer) -> None:
        self.answers.append(answer)
        if isinstance(answer, CopyResult):
            self.results.put_nowait(answer)

    async def _fetch(self, source: PrefixSource, hashes: Sequence[BlockHash]) -> FetchResult:
        self.asked.append((source, tuple(hashes)))
        await self.may_end.wait()
        return self.fetched

    def cache(self, *numbers: int) -> None:
        """A sequence with these blocks has ended."""
        pool = self.core.pool
        blocks = pool.allocate(len(numbers))
        for block, name in zip(blocks, names(*numbers), strict=True):
            assert pool.seal(block, name)
        pool.release(blocks)

    async def told(self, order: CopyOrder) -> tuple[CopyOutcome, str]:
        self.copies.take(order)
        async with asyncio.timeout(10):
            result = await self.results.get()
        assert result.order_id == order.order_id
        return result.outcome, result.reason


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    task = asyncio.create_task(made.copies.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert made.copies.num_waiting == 0
    made.core.pool.check_integrity()


async def test_a_copy_is_fetched_from_its_source(stage: Stage) -> None:
    assert await stage.told(copy_order("o", 1, 2)) == (CopyOutcome.DONE, "fetched")
    source = PrefixSource(WorkerId("source"), 7, Endpoint("h", 1), 2)
    assert stage.asked == [(source, names(1, 2))]


async def test_nothing_that_was_used_of_late_makes_room(stage: Stage) -> None:
    stage.copies.report()
    stage.cache(1, 2, 3, 4, 5, 6)
    assert stage.copies.report().room_blocks == 2
    assert await stage.told(copy_order("o", 11, 12, 13)) == (CopyOutcome.REFUSED, "no_room")
    assert await stage.told(copy_order("p", 1, 11, 12)) == (CopyOutcome.FAILED, "partial")
    stage.clock.advance(1.0)
    stage.copies.report()
    stage.clock.advance(pool_copies.COLD_S)
    assert stage.copies.report().room_blocks == NUM_BLOCKS
    stage.fetched = FetchResult(FetchOutcome.FETCHED, 3, 3, 3000)
    assert await stage.told(copy_order("q", 11, 12, 13)) == (CopyOutcome.DONE, "fetched")


async def test_a_hint_makes_room_at_once_unless_the_blocks_are_in_use(stage: Stage) -> None:
    stage.cache(1, 2, 3, 4, 5, 6)
    stage.core.pool.acquire(stage.core.pool.match(names(1)))
    stage.copies.take(EvictionHint(names(1, 2, 3)))
    assert stage.copies.report().room_blocks == 2 + 2
    stage.core.pool.release(stage.core.pool.match(names(1)))


async def test_a_full_worker_tells_what_leaves_next(stage: Stage) -> None:
    stage.copies.take(OldestOrder(5))
    stage.cache(1, 2, 3)
    stage.cache(4, 5, 6, 7, 8)
    stage.copies.take(OldestOrder(5))
    stage.copies.take(EvictionHint(names(8, 7)))
    stage.copies.take(OldestOrder(1))
    full = OldBlocks("pool", names(3, 2, 1, 8, 7))
    assert stage.answers == [(), (full,), (OldBlocks("pool", names(7)),)]


async def test_orders_wait_for_each_other_and_for_a_while_only(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_copies, "MAX_WAITING", 2)
    stage.may_end.clear()
    for label in ("first", "second"):
        stage.copies.take(copy_order(label, 1, 2))
    assert await stage.told(copy_order("third", 1, 2)) == (CopyOutcome.REFUSED, "busy")
    while not stage.asked:
        await asyncio.sleep(0)
    stage.clock.advance(pool_copies.MAX_WAIT_S + 1)
    stage.may_end.set()
    ends = [await stage.results.get() for _ in range(2)]
    assert [(each.order_id, each.outcome, each.reason) for each in ends] == [
        ("first", CopyOutcome.DONE, "fetched"),
        ("second", CopyOutcome.REFUSED, "late"),
    ]


async def test_what_others_read_here_counts(stage: Stage) -> None:
    assert stage.copies.report().read_blocks_total == 0
    stage.lent = 5
    assert stage.copies.report().read_blocks_total == 5


async def test_who_is_leaving_takes_nothing(stage: Stage) -> None:
    assert not stage.copies.report().leaving
    stage.leaving = True
    assert stage.copies.report().leaving
    assert await stage.told(copy_order("o", 1, 2)) == (CopyOutcome.REFUSED, "leaving")
    assert stage.asked == []


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (FetchResult(FetchOutcome.HELD, 3), (CopyOutcome.DONE, "held")),
        (FetchResult(FetchOutcome.HELD, 1), (CopyOutcome.FAILED, "partial")),
        (FetchResult(FetchOutcome.FETCHED, 2, 2), (CopyOutcome.FAILED, "partial")),
        (FetchResult(FetchOutcome.NO_ROOM, 0), (CopyOutcome.REFUSED, "no_room")),
        (FetchResult(FetchOutcome.LOST, 0), (CopyOutcome.FAILED, "lost")),
        (FetchResult(FetchOutcome.TIMEOUT, 0), (CopyOutcome.FAILED, "timeout")),
        (FetchResult(FetchOutcome.REFUSED, 0, reason="stale"), (CopyOutcome.FAILED, "stale")),
    ],
)
def test_what_a_fetch_came_to(result: FetchResult, expected: tuple[CopyOutcome, str]) -> None:
    assert judge(result, 3) == expected
