"""Whether a request that comes now can still be served in time, or is better refused at once.

Requests that wait for the workers of a group leave its queue at the pace at which these take them.
Where more of one tenant wait than can leave within a request's patience, one more would only wait
to be refused, and cost the gateway the time that the others need.
Tests: tests/unit/policy/test_crowd.py.
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


class Lag:
    """Event-loop lag of one process.

    Attributes:
        now_s: smoothed.
        peak_s: the largest of the last second or so.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.peak_s = 0.0

    def note(self, seconds: float) -> None:
        """Something was done so long after it was due."""
        self.now_s += _LAG_GAIN * (seconds - self.now_s)
        self.peak_s = max(seconds, _PEAK_KEPT * self.peak_s)

    def is_hopeless(self, patience_s: float) -> bool:
        """Whether the process alone makes a request late."""
        return self.now_s > max(patience_s, MIN_LAG_S)


class Crowd:
    """The requests of one group that wait, and how fast they are served; learned while many wait.

    Attributes:
        num_waiting: requests that look for workers now.
    """

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()
        self.num_waiting = 0
        self._interval_s = 0.0
        self._last_busy_at: float | None = None

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
        return self.wait_s(tenant, count) > patience_s

    def _pace(self, seconds: float) -> None:
        if not self._interval_s:
            self._interval_s = seconds
        self._interval_s += _GAIN * (seconds - self._interval_s)
