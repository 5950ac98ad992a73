"""Budgets of a link: bytes per second, and bytes on their way. Pure but for `Pacer`'s lock.

Tests: tests/unit/transfer/test_pacing.py.
"""

from __future__ import annotations

import threading

from kvmesh.core.clock import Clock

_BURST_S = 0.02
_MIN_PIECE_BYTES = 16 << 10
_MAX_PIECE_BYTES = 1 << 20


class TokenBucket:
    """Says when bytes may go so that a rate is kept over any span longer than a burst.

    Bytes are always granted, in order, at a time that the answer names: callers that share a
    bucket are served one after the other and none is asked to try again.
    """

    def __init__(self, bytes_per_s: float, burst_bytes: int) -> None:
        assert bytes_per_s > 0, f"{bytes_per_s} bytes/s"
        assert burst_bytes > 0, f"burst of {burst_bytes} bytes"
        self._rate = bytes_per_s
        self._burst_s = burst_bytes / bytes_per_s
        self._paid_until = float("-inf")

    def take(self, num_bytes: int, now: float) -> float:
        """Seconds from `now` until these bytes may be sent."""
        start = max(self._paid_until, now - self._burst_s)
        self._paid_until = start + num_bytes / self._rate
        return max(0.0, self._paid_until - now)


class CreditWindow:
    """Bytes that may be on their way without an answer; 0 is no bound.

    One piece is let through whatever its size, so a window smaller than a piece still moves.
    """

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self.unanswered_bytes = 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many more may go."""
        return (
            self.unanswered_bytes == 0
            or self._window_bytes == 0
            or self.unanswered_bytes + num_bytes <= self._window_bytes
        )

    def spend(self, num_bytes: int) -> None:
        """They go."""
        self.unanswered_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """They were answered."""
        assert num_bytes <= self.unanswered_bytes, "more was answered than sent"
        self.unanswered_bytes -= num_bytes


class Pacer:
    """Holds senders of one link to its budget; called from their threads.

    Attributes:
        piece_bytes: most that a sender should take at once, so that no wait is long.
    """

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        self.piece_bytes = int(min(max(bytes_per_s * _BURST_S, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES))
        self._bucket = TokenBucket(bytes_per_s, self.piece_bytes)
        self._clock = clock
        self._lock = threading.Lock()

    def delay(self, num_bytes: int) -> float:
        """Seconds to wait before sending."""
        with self._lock:
            return self._bucket.take(num_bytes, self._clock.now())
