"""What is under way and too slow is noticed; what is quick enough, or nothing, is left alone."""

from __future__ import annotations

import asyncio

import pytest

from kvmesh.transfer.stall import PaceWatch, is_starved


@pytest.mark.parametrize(
    ("moved", "left", "starved"),
    [(10, 200, False), (10, 201, True), (1, 1 << 40, True), (0, 1 << 40, False), (10, 0, False)],
)
def test_a_pace_is_too_slow_when_the_rest_would_take_longer_than_patience(
    moved: int, left: int, starved: bool
) -> None:
    assert is_starved(moved, left, window_s=5.0, patience_s=100.0) is starved


async def test_a_watch_measures_from_window_to_window_while_something_is_under_way() -> None:
    moved, told = 0, asyncio.Queue[str]()
    watch = PaceWatch(0.001, 0.01, lambda: moved, told.put_nowait)

    large = watch.begin(1000)
    watch.end(watch.begin(500))
    moved = 99
    assert await told.get() == "99 bytes in 0.001 s, 1000 are left"
    moved += 1
    assert await told.get() == "1 bytes in 0.001 s, 1000 are left"
    watch.end(large)
    moved += 1
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert told.empty()

    watch.begin(1000)
    moved += 2
    assert await told.get() == "2 bytes in 0.001 s, 1000 are left", "the first whole window"
    watch.close()
    watch.close()


async def test_what_has_moved_of_something_is_not_left() -> None:
    moved, told = 0, asyncio.Queue[str]()
    watch = PaceWatch(0.001, 0.01, lambda: moved, told.put_nowait)
    rest = watch.begin(1000)
    rest.num_bytes -= 990
    moved = 1
    while watch._seen == 0:
        await asyncio.sleep(0.001)
    assert told.empty(), "ten are left, in ten windows"
    watch.close()


@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_window_that_began_before_its_bytes_says_nothing(is_busy: bool) -> None:
    moved, told = 0, asyncio.Queue[str]()
    watch = PaceWatch(0.05, 0.5, lambda: moved, told.put_nowait)
    small = watch.begin(5)
    if not is_busy:
        watch.end(small)
    large = watch.begin(1000)
    moved = 1
    while watch._seen == 0:
        await asyncio.sleep(0.001)
    assert told.empty()
    if is_busy:
        watch.end(small)
    moved = 4
    assert await told.get() == "3 bytes in 0.05 s, 1000 are left"
    watch.end(large)
    watch.close()
