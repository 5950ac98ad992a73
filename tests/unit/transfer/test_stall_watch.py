"""When a stall is told: the loop's timers are moved by hand, so that no time passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from kvmesh.transfer.stall import StallWatch

TIMEOUT_S = 8.0
TICKS = 4
"""Of a timeout; the first one after progress is not a whole one, so that it takes one more."""


class Timer:
    """A call that is due in `delay_s`, or was cancelled."""

    def __init__(self, delay_s: float, call: Callable[[], None]) -> None:
        self.delay_s = delay_s
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Timers:
    """Stands in for the loop's timers."""

    def __init__(self) -> None:
        self.waiting: list[Timer] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self.waiting.append(Timer(delay_s, call))
        return self.waiting[-1]

    def tick(self, count: int = 1) -> None:
        """Lets what is due happen, so many times."""
        for _ in range(count):
            due, self.waiting = self.waiting, []
            for timer in due:
                if not timer.is_cancelled:
                    timer.call()


class Watched:
    """A watch, its timers, and what it said."""

    def __init__(self, timers: Timers) -> None:
        self.timers = timers
        self.num_stalls = 0
        self.moved = 0
        self.watch = StallWatch(TIMEOUT_S, self._stalled, lambda: self.moved)

    def _stalled(self) -> None:
        self.num_stalls += 1


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    timers = Timers()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "get_running_loop", lambda: timers)
        yield Watched(timers)


def test_a_stall_is_told_once_after_the_timeout_without_progress(watched: Watched) -> None:
    watched.watch.begin()
    assert [timer.delay_s for timer in watched.timers.waiting] == [TIMEOUT_S / TICKS]
    watched.timers.tick(TICKS)
    assert watched.num_stalls == 0
    watched.timers.tick()
    assert watched.num_stalls == 1
    assert not watched.timers.waiting


def test_progress_begins_the_time_anew(watched: Watched) -> None:
    watched.watch.begin()
    watched.timers.tick(TICKS)
    watched.watch.progress()
    watched.timers.tick(TICKS)
    assert watched.num_stalls == 0
    watched.timers.tick()
    assert watched.num_stalls == 1


def test_bytes_that_moved_are_progress(watched: Watched) -> None:
    watched.watch.begin()
    for _ in range(3 * TICKS):
        watched.moved += 1
        watched.timers.tick()
    assert watched.num_stalls == 0
    # The tick that saw the last ones was the first.
    watched.timers.tick(TICKS)
    assert watched.num_stalls == 1


def test_nothing_under_way_is_no_stall_and_costs_no_timer(watched: Watched) -> None:
    with watched.watch.under_way():
        watched.timers.tick(TICKS)
    watched.timers.tick()
    assert not watched.timers.waiting
    # What waited before does not count against what begins now.
    with watched.watch.under_way():
        watched.timers.tick(TICKS)
        assert watched.num_stalls == 0
        watched.timers.tick()
        assert watched.num_stalls == 1


def test_who_begins_while_another_waits_begins_no_new_time(watched: Watched) -> None:
    watched.watch.begin()
    watched.timers.tick(TICKS)
    watched.watch.begin()
    assert len(watched.timers.waiting) == 1
    watched.watch.end()
    watched.timers.tick()
    assert watched.num_stalls == 1, "the first one is still under way"


def test_after_close_nothing_is_told(watched: Watched) -> None:
    watched.watch.begin()
    watched.watch.close()
    watched.watch.close()
    watched.timers.tick(2 * TICKS)
    assert watched.num_stalls == 0
