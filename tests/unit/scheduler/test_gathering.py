"""Queries that wait for each other; the loop's clock is a fact, not a measure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import pytest

from kvmesh.core.types import Refusal, RefusalReason, RequestId
from kvmesh.policy import gathering
from services.scheduler.gathering import JointDecisions, Outcome, Waiting
from services.scheduler.knowledge import Known, Lookup
from tests.unit.policy.fleet_examples import query
from tests.waiting import until

LONG_S = 3600.0
"""A window that does not end by itself while a test runs."""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, nobody gives up waiting for a lookup."""
    monkeypatch.setattr(gathering, "LOOKUP_S", LONG_S)


class Desk:
    """Notes what was decided together, and answers in reverse."""

    def __init__(self, hold_s: float = 0.0) -> None:
        self.batches: list[list[str]] = []
        self.hold_s = hold_s
        self.fails = False
        self.joint = JointDecisions(lambda _: self.hold_s, self.decide)

    def decide(self, waiting: Sequence[Waiting]) -> list[tuple[Waiting, Outcome]]:
        self.batches.append([each.query.request_id for each in waiting])
        if self.fails:
            raise LookupError("a bug")
        return [
            (each, Refusal(RefusalReason.BUSY, each.query.request_id)) for each in reversed(waiting)
        ]

    async def ask(self, name: str, lookup: Awaitable[object] | None = None) -> str:
        async def look_up() -> Waiting:
            if lookup is not None:
                await lookup
            return Waiting(query(request_id=RequestId(name)), known=Known(None, Lookup.OFF))

        outcome = await self.joint.decided(look_up())
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
    assert desk.joint.num_waiting == 0


@pytest.mark.usefixtures("patient")
async def test_those_with_their_prefixes_wait_for_those_who_look_for_theirs() -> None:
    desk, found = Desk(), asyncio.Event()
    looking = asyncio.create_task(desk.ask("b", found.wait()))
    await started(looking)
    waiting = asyncio.create_task(desk.ask("a"))
    await started(looking, waiting)
    assert desk.joint.num_waiting == 2
    found.set()
    assert (await waiting, await looking) == ("a", "b")
    assert desk.batches == [["a", "b"]]
    assert desk.joint.num_waiting == 0


@pytest.mark.usefixtures("patient")
async def test_a_lookup_that_is_cancelled_keeps_nobody_waiting() -> None:
    desk = Desk()
    looking = asyncio.create_task(desk.ask("b", asyncio.Event().wait()))
    await started(looking)
    waiting = asyncio.create_task(desk.ask("a"))
    await started(waiting)
    looking.cancel()
    await asyncio.wait({looking})
    assert desk.batches == [["a"]], "at once, not when the lookup would have been too late"
    assert await waiting == "a"
    assert desk.joint.num_waiting == 0


async def test_a_lookup_that_fails_keeps_nobody_waiting() -> None:
    async def fail() -> None:
        raise LookupError("a bug")

    desk = Desk()
    with pytest.raises(LookupError):
        await desk.ask("a", fail())
    assert desk.joint.num_waiting == 0
    assert await desk.ask("b") == "b"


@pytest.mark.usefixtures("patient")
async def test_answers_come_in_the_order_of_the_decision() -> None:
    desk, found = Desk(), asyncio.Event()
    told: list[str] = []

    async def ask(name: str, lookup: Awaitable[object] | None = None) -> None:
        await desk.ask(name, lookup)
        told.append(name)

    looking = asyncio.create_task(ask("a", found.wait()))
    await asyncio.sleep(0)
    others = [asyncio.create_task(ask(name)) for name in "bc"]
    await asyncio.sleep(0)
    found.set()
    await asyncio.gather(looking, *others)
    assert desk.batches == [["b", "c", "a"]]
    assert told == ["a", "c", "b"]


async def test_a_lookup_that_takes_too_long_is_not_waited_for() -> None:
    desk = Desk()
    looking = asyncio.create_task(desk.ask("b", asyncio.Event().wait()))
    await started(looking)
    assert await desk.ask("a") == "a"
    assert desk.batches == [["a"]]
    looking.cancel()
    await asyncio.wait({looking})
    assert desk.joint.num_waiting == 0


async def test_a_query_waits_for_its_window_and_for_no_later_one() -> None:
    desk = Desk(hold_s=LONG_S)
    first = asyncio.create_task(desk.ask("a"))
    await started(first)
    desk.hold_s = 0.001
    second = asyncio.create_task(desk.ask("b"))
    assert (await first, await second) == ("a", "b")
    assert desk.batches == [["a", "b"]]


async def test_who_hangs_up_is_not_decided_on() -> None:
    desk = Desk(hold_s=LONG_S)
    gone, stays = asyncio.create_task(desk.ask("a")), asyncio.create_task(desk.ask("b"))
    await started(gone, stays)
    gone.cancel()
    desk.hold_s = 0.0
    assert await desk.ask("c") == "c"
    assert await stays == "b"
    assert desk.batches == [["b", "c"]]
    assert desk.joint.num_waiting == 0


async def test_all_hang_up() -> None:
    desk = Desk(hold_s=1.0)
    gone = asyncio.create_task(desk.ask("a"))
    await started(gone)
    gone.cancel()
    await asyncio.wait({gone})
    await until(lambda: not desk.joint.num_waiting, "the window ends", 10)
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
    assert desk.joint.num_waiting == 0
