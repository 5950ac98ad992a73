"""Adaptive busy polling: whether to poll for a frame before sleeping until it comes. Pure.

A sleeping process takes as long to wake as a small frame takes to arrive, so polling first halves
the time of a small handoff. If nothing arrives in time, polling only costs, so after failed polls
more and more are skipped. Each poll follows a frame, so an idle connection is never polled. Frame
types are
tracked separately: after a PUT a COMMIT follows at once, after a COMMIT nothing.
Tests: tests/unit/transfer/test_polling.py.
"""

from __future__ import annotations

_MAX_SKIPPED = 63
"""Maximum number of polls skipped in a row: one in 64 remains, as the peer may have sped up."""


class Polling:
    """Decides for one end of a connection when and how long to poll after frames of one type."""

    def __init__(self, most_s: float) -> None:
        """`most_s` is the maximum seconds of each poll; 0 disables polling."""
        self._most_s = most_s
        self._skips = 0
        self._left = 0

    def next_s(self) -> float:
        """Returns the seconds to poll now; 0 for none. After a poll the caller calls `saw`."""
        if self._left:
            self._left -= 1
            return 0.0
        return self._most_s

    def saw(self, came: bool) -> None:
        """Records whether the last poll found a frame."""
        self._skips = 0 if came else min(2 * self._skips + 1, _MAX_SKIPPED)
        self._left = self._skips
