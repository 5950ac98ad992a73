"""P/D-Serve's monitor: the mean of a window against those before says which role should get an
instance.

Source: P/D-Serve 3.3, which leaves open what "up" is compared with. The window before alone misses
a change that is spread over several. Tests: tests/unit/policy/test_ratio_monitor.py.
"""

from __future__ import annotations

from kvmesh.policy.pdserve import LatencyWindow, RatioStep, ratio_direction

WINDOW_S = 15.0

MIN_REQUESTS = 8
"""A window of fewer requests goes on: when a load begins, they are in it with their prefill alone,
and everything later would be compared with that."""

FORGET = 0.25
"""Weight of a slower window in what the next ones are compared with."""


class RatioMonitor:
    """Times of the requests of this window, and what is usual.

    Usual is the window after the last step, or a faster one since; slower ones, in which nothing
    was done, move it bit by bit.
    """

    def __init__(self) -> None:
        self._prefill_s = 0.0
        self._total_s = 0.0
        self._count = 0
        self._usual: LatencyWindow | None = None

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
        """What the rule says, and a new window; None: too few requests, or nothing to compare."""
        if self._count < MIN_REQUESTS:
            return None
        now = LatencyWindow(self._prefill_s / self._count, self._total_s / self._count)
        self._prefill_s = self._total_s = 0.0
        self._count = 0
        usual = self._usual
        if usual is None:
            self._usual = now
            return None
        step = ratio_direction(usual, now, num_prefill, num_decode)
        as_usual = step.grow is None and now.total_s >= usual.total_s
        self._usual = _moved(usual, now) if as_usual else now
        return step


def _moved(usual: LatencyWindow, now: LatencyWindow) -> LatencyWindow:
    return LatencyWindow(
        usual.prefill_s + FORGET * (now.prefill_s - usual.prefill_s),
        usual.total_s + FORGET * (now.total_s - usual.total_s),
    )
