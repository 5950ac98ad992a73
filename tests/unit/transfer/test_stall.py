"""What is under way and too slow is noticed; what is quick enough, or nothing, is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvmesh.core.errors import LostError
from kvmesh.transfer.stall import PaceWatch, Rest, excess_of


@pytest.mark.parametrize(
    ("moved", "lefts", "excess"),
    [
        (10, [200], []),
        (10, [201], [0]),
        (1, [1 << 40], [0]),
        (0, [1 << 40], []),
        (10, [0], []),
        (10, [100, 100, 1], [2]),
        (10, [500, 200, 0], [0]),
        (10, [150, 51, 50], [1]),
    ],
)
def test_what_the_pace_of_a_window_leaves_no_room_for_is_too_much(
    moved: int, lefts: list[int], excess: list[int]
) -> None:
    rests = [Rest(left) for left in lefts]
    found = excess_of(rests, moved, window_s=5.0, patience_s=100.0)
    assert found == [rests[index] for index in excess]


def test_what_was_given_up_says_why() -> None:
    rest = Rest(5)
    rest.check()
    rest.given_up = "the link is too slow"
    with pytest.raises(LostError, match="the link is too slow"):
        rest.check()


class Told:
    """A watch, what it measured, and of what."""

    def __init__(self, window_s: float) -> None:
        self.moved = 0
        self.measured = asyncio.Queue[str]()
        self.excess: Sequence[Rest] = ()
        self.held_s = 0.0
        self.watch = PaceWatch(
            window_s, 10 * window_s, lambda: self.moved, self._take, lambda: self.held_s
        )

    def _take(self, measured: str, excess: Sequence[Rest]) -> None:
        self.measured.put_nowait(measured)
        self.excess = excess

    def begin(self, num_bytes: int) -> Rest:
        rest = Rest(num_bytes)
        self.watch.begin(rest)
        return rest


async def test_a_watch_measures_from_window_to_window_while_something_is_under_way() -> None:
    told = Told(0.001)
    large = told.begin(1000)
    told.watch.end(told.begin(500))
    told.moved = 99
    assert await told.measured.get() == "99 bytes in 0.001 s, 1000 are left"
    assert told.excess == [large]
    told.moved += 1
    assert await told.measured.get() == "1 bytes in 0.001 s, 1000 are left"
    told.watch.end(large)
    told.moved += 1
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert told.measured.empty()

    told.begin(1000)
    told.moved += 2
    assert await told.measured.get() == "2 bytes in 0.001 s, 1000 are left", "first whole window"
    told.watch.close()
    told.watch.close()


async def test_what_was_given_up_is_named_until_it_is_over_and_takes_no_room() -> None:
    told = Told(30.0)
    large, small = told.begin(1000), told.begin(10)
    told.watch._tick()
    assert told.measured.empty(), "nothing moved"
    told.moved = 1
    told.watch._tick()
    assert told.measured.get_nowait() == "1 bytes in 30 s, 1010 are left"
    assert (told.excess, told.watch.num_going_on) == ([large], 2)
    large.given_up = "slow"
    told.moved = 2
    told.watch._tick()
    assert told.measured.get_nowait() == "1 bytes in 30 s, 10 are left"
    assert (told.excess, told.watch.num_going_on) == ([large], 1)
    told.watch.end(large)
    told.moved = 3
    told.watch._tick()
    assert told.measured.empty()
    told.watch.end(small)
    told.watch.close()


async def test_what_has_moved_of_something_is_not_left() -> None:
    told = Told(0.001)
    rest = told.begin(1000)
    rest.num_bytes -= 990
    told.moved = 1
    while told.watch._seen == 0:
        await asyncio.sleep(0.001)
    assert told.measured.empty(), "ten are left, in ten windows"
    told.watch.close()


@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_window_that_began_before_its_bytes_says_nothing(is_busy: bool) -> None:
    told = Told(0.05)
    small = told.begin(5)
    if not is_busy:
        told.watch.end(small)
    large = told.begin(1000)
    told.moved = 1
    while told.watch._seen == 0:
        await asyncio.sleep(0.001)
    assert told.measured.empty()
    if is_busy:
        told.watch.end(small)
    told.moved = 4
    assert await told.measured.get() == "3 bytes in 0.05 s, 1000 are left"
    told.watch.end(large)
    told.watch.close()


async def test_a_window_that_senders_spent_waiting_for_a_budget_says_nothing() -> None:
    told = Told(30.0)
    told.begin(1000)
    told.moved, told.held_s = 1, 1e9
    told.watch._tick()
    assert told.measured.empty()
    told.moved = 2
    told.watch._tick()
    assert told.measured.get_nowait() == "1 bytes in 30 s, 1000 are left"
    told.watch.close()
