"""Whether a request that comes now can still be served in time, or is better refused at once.

Requests that wait for workers leave the queue at the pace at which workers take them. Where more of
one tenant wait than can leave within a request's patience, one more would only wait to be refused,
and cost the gateway the time that the others need. Tests: tests/unit/policy/test_crowd.py.
"""

from __future__ import annotations

from collections import Counter

MIN_WAITING = 64
"""With fewer waiting, the pace says more about who comes than about who is served."""

MIN_LAG_S = 0.25
"""Less than this is a busy moment and no reason to refuse, however short a patience is."""

_GAIN = 1 / 16
_LAG_GAIN = 1 / 4
# Noted twenty times a second, a peak is down to half after a second.
_PEAK_KEPT = 0.97


class Crowd:
    """Who waits, and how fast the waiting are served; learned while many wait.

    Attributes:
        num_waiting: requests that look for workers now.
        lag_s: how late the process is with what it has to do, smoothed.
        peak_lag_s: how late it has been of late, at most.
    """

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()
        self.num_waiting = 0
        self._interval_s = 0.0
        self._last_busy_at: float | None = None
        self.lag_s = 0.0
        self.peak_lag_s = 0.0

    def enter(self, tenant: str) -> None:
        """A request begins to look for workers."""
        self._waiting[tenant] += 1
        self.num_waiting += 1

    def leave(self, tenant: str, now: float, *, placed: bool) -> None:
        """It has ended its search.

        Args:
            now: seconds on any clock that only goes forward.
            placed: workers took it.
        """
        busy = self.num_waiting >= MIN_WAITING
        self._waiting[tenant] -= 1
        self.num_waiting -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        if placed and busy and self._last_busy_at is not None:
            self._pace(now - self._last_busy_at)
        if placed or not busy:
            self._last_busy_at = now if busy else None

    def note_lag(self, seconds: float) -> None:
        """Something was done so long after it was due."""
        self.lag_s += _LAG_GAIN * (seconds - self.lag_s)
        self.peak_lag_s = max(seconds, _PEAK_KEPT * self.peak_lag_s)

    def wait_s(self, tenant: str, count: int = 1) -> float:
        """How long more requests of a tenant would wait, at least; 0 while nobody knows.

        Only the tenant's own requests count: those of others may be many and still come later.

        Args:
            count: come together; it is the last one's time.
        """
        num_waiting = self._waiting[tenant]
        if num_waiting < MIN_WAITING:
            return 0.0
        return (num_waiting + count - 1) * self._interval_s

    def is_hopeless(self, tenant: str, patience_s: float, count: int = 1) -> bool:
        """Whether one of so many more requests would not be served within its patience."""
        return self.wait_s(tenant, count) > patience_s or self.lag_s > max(patience_s, MIN_LAG_S)

    def _pace(self, seconds: float) -> None:
        if not self._interval_s:
            self._interval_s = seconds
        self._interval_s += _GAIN * (seconds - self._interval_s)
