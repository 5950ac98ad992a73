"""Clocks that are passed as arguments, so that decisions can run on a virtual clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()


class ManualClock:
    """A clock that tests and the simulator move by hand."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Returns the time that the clock was set to."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock forward by `seconds`."""
        if seconds < 0:
            raise ValueError(f"a clock does not go back: {seconds} s")
        self._now += seconds
