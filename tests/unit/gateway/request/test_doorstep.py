"""A few requests begin in each turn of the loop, in the order in which they were read."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.request.doorstep import PER_TURN, Doorstep


def _crowd(doorstep: Doorstep, begun: list[int], count: int) -> list[asyncio.Task[None]]:
    now = asyncio.get_running_loop().time()

    async def request(number: int) -> None:
        await doorstep.enter(now)
        begun.append(number)

    return [asyncio.create_task(request(number)) for number in range(count)]


async def test_who_comes_alone_does_not_wait() -> None:
    doorstep = Doorstep()
    entering = doorstep.enter(asyncio.get_running_loop().time() - 3.0)
    with pytest.raises(StopIteration) as ended:  # its first step is its last
        entering.send(None)
    assert ended.value.value == doorstep.age_s >= 3.0


async def test_few_begin_in_a_turn_and_all_of_them_in_order() -> None:
    doorstep, begun = Doorstep(), list[int]()
    tasks = _crowd(doorstep, begun, 5 * PER_TURN)
    seen = 0
    while len(begun) < len(tasks):
        await asyncio.sleep(0)
        assert len(begun) - seen <= PER_TURN
        seen = len(begun)
    assert begun == list(range(len(tasks)))
    await asyncio.gather(*tasks)


async def test_who_leaves_holds_up_nobody() -> None:
    doorstep, begun = Doorstep(), list[int]()
    tasks = _crowd(doorstep, begun, 6 * PER_TURN)
    await asyncio.sleep(0)
    for task in tasks[PER_TURN : 5 * PER_TURN]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert begun == [*range(PER_TURN), *range(5 * PER_TURN, 6 * PER_TURN)]
    again = list[int]()
    await asyncio.gather(*_crowd(doorstep, again, 1))
    assert again == [0]


async def test_a_line_that_is_older_than_a_patience_is_hopeless() -> None:
    doorstep = Doorstep()
    assert not doorstep.is_hopeless(0.0)
    now = asyncio.get_running_loop().time()
    old = [asyncio.create_task(doorstep.enter(now - 7.0)) for _ in range(3 * PER_TURN)]
    await asyncio.sleep(0)
    assert doorstep.is_hopeless(5.0)
    assert not doorstep.is_hopeless(60.0)
    assert min(await asyncio.gather(*old)) >= 7.0
    assert not doorstep.is_hopeless(5.0)  # nobody waits any more
