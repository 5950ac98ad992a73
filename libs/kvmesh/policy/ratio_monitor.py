"""P/D-Serve's monitor: means of two windows in a row say which role should get an instance.

Source: P/D-Serve 3.3. Tests: tests/unit/policy/test_ratio_monitor.py.
"""

from __future__ import annotations

from kvmesh.policy.pdserve import LatencyWindow, RatioStep, ratio_direction

WINDOW_S = 15.0


class RatioMonitor:
    """Times of the requests of this window, and the window before."""

    def __init__(self) -> None:
        self._prefill_s = 0.0
        self._total_s = 0.0
        self._count = 0
        self._before: LatencyWindow | None = None

    def note(self, prefill_s: float, total_s: float) -> None:
        """A request finished, by someone who measures each.

        Args:
            prefill_s: from arrival to the first token.
            total_s: from arrival to the last one.
        """
        self._prefill_s += prefill_s
        self._total_s += total_s
        self._count += 1

    def observe(self, prefilling: float, decoding: float, num_new: int, elapsed_s: float) -> None:
        """Counts instead of times: the mean time in a stage is the mean number of requests in it,
        divided by the rate at which they come (Little's law).

        Args:
            prefilling: requests without a first token now, those that wait included.
            decoding: requests with one.
            num_new: arrivals since the last call.
            elapsed_s: since the last call.
        """
        self._prefill_s += prefilling * elapsed_s
        self._total_s += (prefilling + decoding) * elapsed_s
        self._count += num_new

    def end_window(self, num_prefill: int, num_decode: int) -> RatioStep | None:
        """What the rule says, and a new window; None without two windows to compare."""
        if not self._count:
            return None
        now = LatencyWindow(self._prefill_s / self._count, self._total_s / self._count)
        before, self._before = self._before, now
        self._prefill_s = self._total_s = 0.0
        self._count = 0
        if before is None:
            return None
        return ratio_direction(before, now, num_prefill, num_decode)
