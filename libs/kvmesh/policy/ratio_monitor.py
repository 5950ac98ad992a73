"""P/D-Serve's monitor: the times of a window say which role should get an instance, and those after
that whether it was right.

Source: P/D-Serve 2.1 and 3.3, which leave open what "up" is compared with, and what follows a
change. Waiting is the model's sign of a role that is short (2.1), so it never becomes usual: where
requests wait, times are compared with those had nobody waited, and a ratio that is wrong from the
first window on is seen in that window. Where none do, they are compared with what is usual.
Tests: tests/unit/policy/test_ratio_monitor.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvmesh.core.types import Role
from kvmesh.policy.pdserve import (
    TOLERANCE,
    LatencyWindow,
    RatioReason,
    RatioStep,
    ratio_direction,
)
from kvmesh.policy.waiting import Waiting

WINDOW_S = 15.0

MIN_REQUESTS = 8
"""A window of fewer requests goes on: a mean of so few says nothing."""

FORGET = 0.25
"""Weight of a window in what is usual."""

WAITING = 0.25
"""Requests that come at random wait for a while even where nothing is short; this much of the time
that they take otherwise is no reason to change."""

NEARLY_ALL = 0.9
"""Of the waiting: more of it for one role is all for that one. A stage that takes next to no time
else has its share kept by a wait of a tenth of a second, whatever requests wait for the other one.
"""

SETTLE_WINDOWS = 1
"""After a change: the instance drains, and what had queued up is still served."""

HOLD_WINDOWS = 8
"""So long a change is taken back only if times are worse than those that it was made for. Compared
with what is usual, the times just after it always seem to ask for the way back: the role that gave
has more to do, and the other one less. Counted are windows with enough requests: a time without any
says nothing of the change, however long it is."""

MAX_HOLD_WINDOWS = 64
"""Each change that takes one back doubles the hold, up to this: where both ratios are wrong at
times, instances would go to and fro."""


@dataclass(frozen=True, slots=True)
class StageCounts:
    """Requests in each stage at one moment.

    Attributes:
        waiting: for a worker of each role.
        prefilling: accepted by a worker, and without a first token.
        decoding: with one.
    """

    waiting: Waiting
    prefilling: float
    decoding: float


@dataclass(slots=True)
class _Sums:
    """Request-seconds in each stage, and arrivals."""

    wait_prefill: float = 0.0
    wait_decode: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    count: float = 0.0

    def window(self) -> LatencyWindow:
        """Mean times, waiting included."""
        waited = self.wait_prefill + self.wait_decode
        for_prefill = self.wait_prefill
        if for_prefill > NEARLY_ALL * waited:
            for_prefill = waited
        elif self.wait_decode > NEARLY_ALL * waited:
            for_prefill = 0.0
        total = waited + self.prefill + self.decode
        return LatencyWindow((for_prefill + self.prefill) / self.count, total / self.count)

    def quiet_window(self) -> LatencyWindow:
        """Mean times had nobody waited."""
        return LatencyWindow(self.prefill / self.count, (self.prefill + self.decode) / self.count)


@dataclass(slots=True)
class _Change:
    """The last step that was taken.

    Attributes:
        before: times of the window that asked for it.
        age: windows since.
    """

    grow: Role
    before: LatencyWindow
    age: int = 0


class RatioMonitor:
    """Times of the requests of this window, what is usual, and the change that is on trial.

    Times are counted, not measured: the mean time in a stage is the mean number of requests in it,
    divided by the rate at which they come (Little's law).
    """

    def __init__(self) -> None:
        self._sums = _Sums()
        self._usual: LatencyWindow | None = None
        self._change: _Change | None = None
        self._asked: _Change | None = None
        self._hold = HOLD_WINDOWS

    def observe(self, counts: StageCounts, num_new: float, elapsed_s: float) -> None:
        """Takes a sample.

        Args:
            num_new: arrivals since the last call; a fraction where groups share a scenario.
            elapsed_s: since the last call.
        """
        sums = self._sums
        sums.wait_prefill += counts.waiting.prefill * elapsed_s
        sums.wait_decode += counts.waiting.decode * elapsed_s
        sums.prefill += counts.prefilling * elapsed_s
        sums.decode += counts.decoding * elapsed_s
        sums.count += num_new

    def end_window(self, num_prefill: int, num_decode: int) -> RatioStep | None:
        """What the rule says, and a new window; None: too few requests, and this one goes on.

        Who does what it says calls `carried_out`: of what nobody did no better times are expected.
        """
        sums = self._sums
        if sums.count < MIN_REQUESTS:
            return None
        self._sums = _Sums()
        now, quiet = sums.window(), sums.quiet_window()
        # A mean of n counts is off by about one part in the root of n.
        tolerance = max(TOLERANCE, 1.0 / math.sqrt(sums.count))
        waited = now.total_s > (1.0 + max(tolerance, WAITING)) * quiet.total_s
        # Who is refused in the end has waited and taken no other time, which makes the mean of that
        # less than usual: a window with waiting is compared with itself.
        before, seen = (quiet, now) if waited else (self._usual or quiet, quiet)
        if not waited:
            self._usual = _moved(before, quiet)
        change = self._aged_change()
        if change is not None and change.age <= SETTLE_WINDOWS:
            return RatioStep(None, RatioReason.SETTLING)
        step = ratio_direction(before, seen, num_prefill, num_decode, tolerance)
        goes_back = change is not None and step.grow not in (None, change.grow)
        self._asked = None
        if change is not None and goes_back and change.age <= self._hold:
            worse = ratio_direction(change.before, now, num_prefill, num_decode, tolerance)
            if worse.grow is not step.grow:
                return RatioStep(None, RatioReason.HOLD)
            step = RatioStep(step.grow, RatioReason.TAKEN_BACK)
        if step.grow is not None:
            if not waited:
                self._usual = quiet  # one change answers it; what is slower still asks again
            self._asked = _Change(step.grow, now)
        return step

    def carried_out(self) -> None:
        """An instance changes to the role that the last window asked for."""
        before, asked = self._change, self._asked
        if asked is None:
            return
        if before is not None and before.grow is not asked.grow:
            self._hold = min(2 * self._hold, MAX_HOLD_WINDOWS)
        self._change, self._asked = asked, None

    def _aged_change(self) -> _Change | None:
        """The last step, one window older; one that was right for long enough is forgotten."""
        change = self._change
        if change is not None:
            change.age += 1
            if change.age > 2 * self._hold:
                self._change, self._hold = None, HOLD_WINDOWS
        return self._change


def _moved(usual: LatencyWindow, now: LatencyWindow) -> LatencyWindow:
    return LatencyWindow(
        usual.prefill_s + FORGET * (now.prefill_s - usual.prefill_s),
        usual.total_s + FORGET * (now.total_s - usual.total_s),
    )
