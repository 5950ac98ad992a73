"""A queue of future events and the virtual clock that follows it.

Tests: tests/unit/sim/test_events.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], object]
"""Its result is not used."""


class Timer:
    """An event that was scheduled; `cancel` makes it not happen."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        """Drops the event; may be called again, and after it happened."""
        self.action = None


class EventQueue:
    """Events in order of time; those of one moment in the order in which they were scheduled."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._now = 0.0
        self._num_scheduled = 0
        self.num_events = 0

    def now(self) -> float:
        """Virtual seconds since the start (`core.clock.Clock`)."""
        return self._now

    def at(self, time: float, action: Action) -> Timer:
        """Schedules an action; a moment in the past is now."""
        timer = Timer(action)
        self._num_scheduled += 1
        heapq.heappush(self._heap, (max(time, self._now), self._num_scheduled, timer))
        return timer

    def after(self, delay: float, action: Action) -> Timer:
        """Schedules an action `delay` seconds from now."""
        return self.at(self._now + delay, action)

    def run(self, until: Callable[[], bool]) -> None:
        """Lets events happen until the condition holds or none are left."""
        while self._heap and not until():
            time, _, timer = heapq.heappop(self._heap)
            action = timer.action
            if action is None:
                continue
            self._now = time
            self.num_events += 1
            timer.action = None
            action()
