from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvmesh.policy.fair_share import MIN_HEADS, Claim
from services.gateway.request.turnstile import Turn, Turnstile


class Workers:
    """Slots that free up one at a time, for whoever asks first."""

    def __init__(self) -> None:
        self.free = 0
        self.served: list[str] = []

    async def look(self, turns: Turnstile, claim: Claim) -> None:
        with turns.enter(claim) as turn:
            await turn.wait(60)
            while self.free == 0:
                turn.missed()
                await asyncio.sleep(0)
                await turn.wait(60)
            self.free -= 1
            self.served.append(claim.tenant)

    async def free_some(self, count: int) -> None:
        for _ in range(count):
            self.free += 1
            done = len(self.served)
            while len(self.served) == done:
                await asyncio.sleep(0)


async def test_while_nobody_looks_in_vain_nobody_waits() -> None:
    turns, workers = Turnstile(), Workers()
    workers.free = 50
    await asyncio.gather(*(workers.look(turns, Claim("a", 1)) for _ in range(50)))
    assert turns.num_waiting == 0


async def test_two_tenants_share_what_is_scarce_although_one_floods() -> None:
    turns, workers = Turnstile(), Workers()
    flood = [asyncio.create_task(workers.look(turns, Claim("a", 10))) for _ in range(300)]
    await workers.free_some(20)
    polite = [asyncio.create_task(workers.look(turns, Claim("b", 10))) for _ in range(20)]
    await asyncio.sleep(0)
    del workers.served[:]
    await workers.free_some(40)
    shares = Counter(workers.served)
    assert shares["b"] >= 20 - MIN_HEADS  # few are placed out of order: heads race
    for task in (*flood, *polite):
        task.cancel()
    await asyncio.wait({*flood, *polite})
    assert turns.num_waiting == 0


async def test_few_look_at_a_time_and_all_leave() -> None:
    turns = Turnstile()
    looking: list[Turn] = []

    async def look() -> None:
        with turns.enter(Claim("a", 1)) as turn:
            turn.missed()
            await turn.wait(60)
            looking.append(turn)
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(look()) for _ in range(100)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 1 <= len(looking) <= 2 * MIN_HEADS
    heads = [turn for turn in looking if turn.allowed.is_set()]
    assert sum(1 / turns.pace(turn) for turn in heads) == pytest.approx(100), "as often as all"
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert turns.num_waiting == 0


async def test_a_moved_stream_waits_for_nobody() -> None:
    turns = Turnstile()
    with turns.enter(Claim("a", 1)) as first:
        first.missed()
        with turns.enter(None) as moved:
            moved.missed()
            await moved.wait(60)
            assert not moved.is_queued
        assert turns.num_waiting == 1


async def test_who_waits_for_one_cluster_does_not_hold_up_who_waits_for_the_other() -> None:
    turns = Turnstile()
    asked: list[str] = []

    async def look(name: str, *, remote: bool) -> None:
        with turns.enter(Claim("a", 1)) as turn:
            await turn.wait(60)
            turn.waits_for(remote=remote)
            await turn.wait(60)
            asked.append(name)
            turn.missed()
            await asyncio.Event().wait()

    tasks = {
        name: asyncio.create_task(look(name, remote=name.startswith("far")))
        for name in ("far 0", *(f"home {number}" for number in range(10)), "far 1")
    }
    for _ in range(50):
        await asyncio.sleep(0)
    assert asked == ["far 0", *(f"home {n}" for n in range(MIN_HEADS)), "far 1"]
    tasks["home 1"].cancel()
    for _ in range(50):
        await asyncio.sleep(0)
    assert asked[-1] == f"home {MIN_HEADS}"
    for task in tasks.values():
        task.cancel()
    await asyncio.wait(tasks.values())
    assert turns.num_waiting == 0


async def test_the_wait_ends_at_its_deadline() -> None:
    turns = Turnstile()

    async def hold() -> None:
        with turns.enter(Claim("a", 1)) as turn:
            turn.missed()
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(hold()) for _ in range(MIN_HEADS)]
    await asyncio.sleep(0)
    with turns.enter(Claim("a", 1)) as last:
        assert last.is_queued
        await last.wait(0.01)
        assert not last.allowed.is_set()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def test_a_turn_belongs_to_one_turnstile() -> None:
    turns = Turnstile()
    turn = Turn(turns, None)
    turn.missed()
    assert turns.num_waiting == 0
