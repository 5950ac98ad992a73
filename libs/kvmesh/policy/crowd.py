"""Admission control: decides whether a new request can still be served in time, or is refused now.

Requests that wait for a group's workers leave its queue at the pace at which these accept them. If
more of a tenant's requests wait than can leave within a new one's patience, that one would only
wait for its refusal. Meanwhile it would cost the gateway time that the others need.
Tests: tests/unit/policy/test_crowd.py.
"""

from __future__ import annotations

from collections import Counter

MIN_WAITING = 64
"""Minimum number of waiting requests for a measurement of pace: with fewer, the pace reflects
arrivals more than service."""

MIN_PACED = 16
"""Minimum number of accepted requests for a measurement of pace: workers accept prompts in clumps,
so a few intervals say little."""

MIN_LAG_S = 0.25
"""Seconds of event-loop lag up to which no request is refused, however short its patience: a busy
moment."""

_GAIN = 1 / 16
_LAG_GAIN = 1 / 4
# With twenty samples a second a peak falls to half after a second.
_PEAK_KEPT = 0.97


class Lag:
    """Event-loop lag of one process.

    Attributes:
        now_s: smoothed lag in seconds.
        peak_s: largest lag of about the last second, in seconds.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.peak_s = 0.0

    def note(self, seconds: float) -> None:
        """Adds a sample: the seconds by which a due callback ran late."""
        self.now_s += _LAG_GAIN * (seconds - self.now_s)
        self.peak_s = max(seconds, _PEAK_KEPT * self.peak_s)

    def is_hopeless(self, patience_s: float) -> bool:
        """Whether the lag alone makes a request late."""
        return self.now_s > max(patience_s, MIN_LAG_S)


class Crowd:
    """The waiting requests of one group, and their pace of service, measured while many wait.

    Attributes:
        num_waiting: number of requests that look for workers now.
    """

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()
        self.num_waiting = 0
        self._interval_s = 0.0
        self._num_paced = 0
        self._last_busy_at: float | None = None

    def enter(self, tenant: str) -> None:
        """Adds a request that begins to look for workers."""
        self._waiting[tenant] += 1
        self.num_waiting += 1

    def leave(self, tenant: str, now: float, *, placed: bool) -> None:
        """Removes a request that ended its search.

        Args:
            now: seconds on any monotonic clock.
            placed: whether workers accepted it.
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
        """Returns the minimum wait of further requests of a tenant in seconds; 0 while not known.

        Only the tenant's own requests count: others may be many and still be served later.

        Args:
            count: number of requests that arrive together; the wait is that of the last one.
        """
        num_waiting = self._waiting[tenant]
        if num_waiting < MIN_WAITING or self._num_paced < MIN_PACED:
            return 0.0
        return (num_waiting + count - 1) * self._interval_s

    def is_hopeless(self, tenant: str, patience_s: float, count: int = 1) -> bool:
        """Whether the last of `count` further requests would exceed its patience."""
        return self.wait_s(tenant, count) > patience_s

    def _pace(self, seconds: float) -> None:
        self._num_paced += 1
        # The mean of all intervals at first, so that the first one does not count for sixteen.
        gain = max(_GAIN, 1.0 / self._num_paced)
        self._interval_s += gain * (seconds - self._interval_s)
