"""Whether to look for a frame before sleeping until it comes. Pure.

A process that sleeps takes as long to wake as a small frame takes to come, so looking for it first
halves a small handoff; where nothing comes in time it only costs. Looks that were for nothing are
therefore followed by more and more times without one. Nobody looks while nothing is under way:
each look follows a frame, and frames of each kind have looks of their own: after a PUT a COMMIT
follows at once, after a COMMIT nothing. Tests: tests/unit/transfer/test_polling.py.
"""

from __future__ import annotations

_MAX_SKIPPED = 63
"""After many looks for nothing one frame in 64 is looked for: the peer may have become quick."""


class Polling:
    """When one end of a connection looks for what follows frames of one kind, and how long."""

    def __init__(self, most_s: float) -> None:
        """`most_s` bounds each look; 0 is none."""
        self._most_s = most_s
        self._skips = 0
        self._left = 0

    def next_s(self) -> float:
        """How long to look now; 0: not at all. `saw` follows where it is more."""
        if self._left:
            self._left -= 1
            return 0.0
        return self._most_s

    def saw(self, came: bool) -> None:
        """What the look that was just made gave."""
        self._skips = 0 if came else min(2 * self._skips + 1, _MAX_SKIPPED)
        self._left = self._skips
