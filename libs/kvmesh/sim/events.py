"""A queue of future events and the virtual clock that follows it.

Tests: tests/unit/sim/test_events.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

Action = Callable[[], object]
"""Callback of an event; its result is ignored."""


class Timer:
    """A scheduled event that can be cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        """Cancels the event; may be called again, also after it happened."""
        self.action = None


class EventQueue:
    """Events in order of time; events of one moment in the order of scheduling."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._now = 0.0
        self._num_scheduled = 0
        self._feed: Iterator[tuple[float, Action]] = iter(())
        self._fed: tuple[float, Action] | None = None
        self.num_events = 0

    def now(self) -> float:
        """Returns the virtual seconds since the start (`core.clock.Clock`)."""
        return self._now

    def at(self, time: float, action: Action) -> Timer:
        """Schedules an action; a time in the past counts as now."""
        timer = Timer(action)
        self._num_scheduled = number = self._num_scheduled + 1
        heapq.heappush(self._heap, (time if time > self._now else self._now, number, timer))
        return timer

    def after(self, delay: float, action: Action) -> Timer:
        """Schedules an action `delay` seconds from now."""
        return self.at(self._now + delay, action)

    def feed(self, events: Iterator[tuple[float, Action]]) -> None:
        """Adds events that are known from the start, in order of time.

        They are read one by one as time passes, because a million of them in the queue would slow
        it down. They come before scheduled events of the same time. Only one feed at a time.
        """
        assert self._fed is None, "the last feed is not at its end"
        self._feed = events
        self._fed = next(events, None)

    def run(self, until: Callable[[], bool]) -> None:
        """Runs events until the condition holds or none are left."""
        heap = self._heap
        while (heap or self._fed is not None) and not until():
            fed = self._fed
            if fed is not None and (not heap or fed[0] <= heap[0][0]):
                self._fed = next(self._feed, None)
                self._now = max(fed[0], self._now)
                action = fed[1]
            else:
                time, _, timer = heapq.heappop(heap)
                if timer.action is None:
                    continue
                self._now = time
                action, timer.action = timer.action, None
            self.num_events += 1
            action()
