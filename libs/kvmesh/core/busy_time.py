"""Measures the time in which something is in progress. Tests: tests/unit/core/test_busy_time.py."""

from __future__ import annotations


class BusyTime:
    """Total time with at least one activity in progress; overlapping ones count once."""

    __slots__ = ("_began_at", "_ended_s", "_num_under_way")

    def __init__(self) -> None:
        """Starts with no activity."""
        self._ended_s = self._began_at = 0.0
        self._num_under_way = 0

    def begin(self, now: float) -> None:
        """Records that an activity begins."""
        if self._num_under_way == 0:
            self._began_at = now
        self._num_under_way += 1

    def end(self, now: float) -> None:
        """Records that an activity ends."""
        self._num_under_way -= 1
        if self._num_under_way == 0:
            self._ended_s += now - self._began_at

    def seconds(self, now: float) -> float:
        """Returns the total so far in seconds; never falls."""
        return self._ended_s + (now - self._began_at if self._num_under_way else 0.0)
