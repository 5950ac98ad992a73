"""How long something was under way. Tests: tests/unit/core/test_busy_time.py."""

from __future__ import annotations


class BusyTime:
    """Time with at least one of several things under way; those at once count once."""

    __slots__ = ("_began_at", "_ended_s", "_num_under_way")

    def __init__(self) -> None:
        """Nothing is under way."""
        self._ended_s = self._began_at = 0.0
        self._num_under_way = 0

    def begin(self, now: float) -> None:
        """One thing more is under way, until `end`."""
        if self._num_under_way == 0:
            self._began_at = now
        self._num_under_way += 1

    def end(self, now: float) -> None:
        """One of them is over."""
        self._num_under_way -= 1
        if self._num_under_way == 0:
            self._ended_s += now - self._began_at

    def seconds(self, now: float) -> float:
        """All of it so far; never falls."""
        return self._ended_s + (now - self._began_at if self._num_under_way else 0.0)
