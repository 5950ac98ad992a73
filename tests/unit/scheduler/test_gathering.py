"""Queries that wait for each other; the loop's clock is a fact, not a measure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from kvmesh.core.types import Refusal, RefusalReason, RequestId
from kvmesh.policy.joint import MAX_JOINT
from services.scheduler.gathering import Gathering, Outcome, Waiting
from tests.unit.policy.fleet_examples import query

LONG_S = 3600.0
"""A window that does not end by itself while a test runs."""


class Desk:
    """Notes what was decided together, and answers in reverse."""

    def __init__(self, window_s: float = LONG_S, hold_s: float = 0.0) -> None:
        self.batches: list[list[str]] = []
        self.hold_s = hold_s
        self.fails = False
        self.gathering = Gathering(window_s, lambda _: self.hold_s, self.decide)

    def decide(self, waiting: Sequence[Waiting]) -> list[tuple[Waiting, Outcome]]:
        self.batches.append([each.query.request_id for each in waiting])
        if self.fails:
            raise LookupError("a bug")
        return [
            (each, Refusal(RefusalReason.BUSY, each.query.request_id)) for each in reversed(waiting)
        ]

    async def ask(self, name: str) -> str:
        outcome = await self.gathering.decided(
            Waiting(query(request_id=RequestId(name)), known=None)
        )
        assert isinstance(outcome, Refusal)
        return outcome.message


async def started(*asks: asyncio.Task[str]) -> None:
    """All have come as far as they can by themselves."""
    for _ in range(3):
        await asyncio.sleep(0)
    assert not any(each.done() for each in asks)


async def test_who_comes_alone_waits_for_nothing() -> None:
    desk = Desk()
    assert await desk.ask("a") == "a"
    assert await desk.ask("b") == "b"
    assert desk.batches == [["a"], ["b"]]
    assert desk.gathering.num_waiting == 0


async def test_those_with_their_prefixes_wait_for_those_who_look_for_theirs() -> None:
    desk = Desk()
    with desk.gathering.looking():
        waiting = asyncio.create_task(desk.ask("a"))
        await started(waiting)
        assert desk.gathering.num_waiting == 2
    assert await desk.ask("b") == "b"
    assert await waiting == "a"
    assert desk.batches == [["a", "b"]]
    assert desk.gathering.num_waiting == 0


async def test_lookups_that_begin_later_are_not_waited_for() -> None:
    desk = Desk()
    with contextlib.ExitStack() as later:
        with desk.gathering.looking():
            waiting = asyncio.create_task(desk.ask("a"))
            await started(waiting)
            later.enter_context(desk.gathering.looking())
        assert await desk.ask("b") == "b"
        assert await waiting == "a"
    assert desk.batches == [["a", "b"]]


async def test_answers_come_in_the_order_of_the_decision() -> None:
    desk = Desk()
    told: list[str] = []

    async def ask(name: str) -> None:
        told.append(await desk.ask(name))

    with desk.gathering.looking():
        first = [asyncio.create_task(ask(name)) for name in "ab"]
        await asyncio.sleep(0)
    await ask("c")
    await asyncio.gather(*first)
    assert desk.batches == [["a", "b", "c"]]
    assert told.index("b") < told.index("a")


async def test_a_lookup_that_takes_too_long_is_not_waited_for() -> None:
    desk = Desk(window_s=0.001)
    with desk.gathering.looking():
        assert await desk.ask("a") == "a"
    assert desk.batches == [["a"]]


async def test_a_query_waits_for_its_window_and_for_no_later_one() -> None:
    desk = Desk(hold_s=LONG_S)
    first = asyncio.create_task(desk.ask("a"))
    await started(first)
    desk.hold_s = 0.001
    second = asyncio.create_task(desk.ask("b"))
    assert (await first, await second) == ("a", "b")
    assert desk.batches == [["a", "b"]]


async def test_so_many_are_decided_at_once_and_no_more() -> None:
    desk = Desk(hold_s=LONG_S)
    names = [f"r{number}" for number in range(MAX_JOINT)]
    assert await asyncio.gather(*map(desk.ask, names)) == names
    assert desk.batches == [names]


async def test_who_hangs_up_is_not_decided_on() -> None:
    desk = Desk(hold_s=LONG_S)
    gone, stays = asyncio.create_task(desk.ask("a")), asyncio.create_task(desk.ask("b"))
    await started(gone, stays)
    gone.cancel()
    desk.hold_s = 0.0
    assert await desk.ask("c") == "c"
    assert await stays == "b"
    assert desk.batches == [["b", "c"]]
    assert desk.gathering.num_waiting == 0


async def test_all_hang_up() -> None:
    desk = Desk(hold_s=0.001)
    gone = asyncio.create_task(desk.ask("a"))
    await started(gone)
    gone.cancel()
    await asyncio.wait({gone})
    while desk.gathering.num_waiting:
        await asyncio.sleep(0)
    assert desk.batches == []


async def test_a_decision_that_fails_leaves_nobody_waiting() -> None:
    desk = Desk(hold_s=LONG_S)
    first = asyncio.create_task(desk.ask("a"))
    await started(first)
    desk.hold_s, desk.fails = 0.0, True
    with pytest.raises(LookupError):
        await desk.ask("b")
    with pytest.raises(RuntimeError, match="failed"):
        await first  # not a cancel, which would leave its gateway without an answer
    assert desk.gathering.num_waiting == 0
