"""P/D-Serve's monitor: a window's latencies say which role should get an instance, and later
windows whether that was right.

Source: P/D-Serve 2.1 and 3.3. The paper leaves open with which latency the present one is compared,
and what follows a change. Here, waiting is the sign of a short role (2.1), so it never becomes part
of the usual latency. If requests wait, a window is compared with its own latencies without the
waiting; a ratio that is wrong from the start shows in the first window. If none wait, the window is
compared with the usual latency.
Tests: tests/unit/policy/test_ratio_monitor.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvmesh.core.types import Role, WorkerLoad
from kvmesh.policy.pdserve import (
    TOLERANCE,
    InstanceProfile,
    LatencyWindow,
    RatioReason,
    RatioStep,
    ratio_direction,
)
from kvmesh.policy.profiled_ratio import MeanLengths, checked_step, step_by_rate
from kvmesh.policy.waiting import Waiting

WINDOW_S = 5.0
"""Seconds of one window: as load scores are averaged for role switches. A load that changes within
a minute has passed before longer windows have shown it."""

MIN_REQUESTS = 8
"""Minimum number of requests in a window; with fewer it is extended, as their mean says nothing."""

FORGET = 0.25
"""Weight of the newest window in the usual latency."""

WAITING = 0.25
"""Waiting as a fraction of the remaining latency that is no reason to change: requests that arrive
at random wait a little even where no role is short."""

NEARLY_ALL = 0.9
"""Fraction of the waiting for one role from which all of it counts for that role. Otherwise a short
wait for a stage that takes almost no time would keep that stage's share up, however long requests
wait for the other role.
"""

SETTLE_WINDOWS = 1
"""Number of windows after a change that are not judged: the instance drains, and the old queue is
still served."""

HOLD_WINDOWS = 8
"""Number of windows after a change in which it is taken back only if latencies are worse than those
that caused it. Compared with the usual latency, the first windows always ask for the way back: the
role that gave an instance has more to do, the other one less. Only windows with enough requests
count; a time without requests says nothing about the change."""

MAX_HOLD_WINDOWS = 64
"""Maximum hold in windows. Each change that takes back another doubles the hold: otherwise
instances would go back and forth where both ratios are wrong at times."""


@dataclass(frozen=True, slots=True)
class StageCounts:
    """Requests in each stage at one moment.

    Attributes:
        waiting: requests that wait for a worker of each role.
        prefilling: requests that a worker accepted and that have no first token yet.
        decoding: requests that have their first token.
    """

    waiting: Waiting
    prefilling: float
    decoding: float

    @classmethod
    def of(cls, waiting: Waiting, loads: Iterable[WorkerLoad]) -> StageCounts:
        """Counts by the loads of a group's workers; who waits for a transfer has a first token."""
        prefilling = decoding = 0
        for load in loads:
            prefilling += load.prefill_active - load.prefill_sending
            decoding += load.prefill_sending + load.decode_running + load.decode_preempted
        return cls(waiting, prefilling, decoding)


@dataclass(slots=True)
class _Sums:
    """Request-seconds in each stage, the number of arrivals, and tokens of the noted ones."""

    wait_prefill: float = 0.0
    wait_decode: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    count: float = 0.0
    uncached_tokens: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    noted: float = 0.0

    def window(self) -> LatencyWindow:
        """Returns the mean times, waiting included."""
        waited = self.wait_prefill + self.wait_decode
        for_prefill = self.wait_prefill
        if for_prefill > NEARLY_ALL * waited:
            for_prefill = waited
        elif self.wait_decode > NEARLY_ALL * waited:
            for_prefill = 0.0
        total = waited + self.prefill + self.decode
        return LatencyWindow((for_prefill + self.prefill) / self.count, total / self.count)

    def quiet_window(self) -> LatencyWindow:
        """Returns the mean times without the waiting."""
        return LatencyWindow(self.prefill / self.count, (self.prefill + self.decode) / self.count)


@dataclass(slots=True)
class _Change:
    """The last step that was taken.

    Attributes:
        grow: the role that got an instance.
        before: times of the window that asked for it.
        age: number of windows since.
    """

    grow: Role
    before: LatencyWindow
    age: int = 0


class RatioMonitor:
    """Monitors the latencies of one scenario and asks for changes of the ratio (P/D-Serve 3.3).

    It keeps the current window, the usual latency, and the last change while it is on trial. Times
    are derived from counts: the mean time in a stage is the mean number of requests in it, divided
    by their arrival rate (Little's law).
    """

    def __init__(self) -> None:
        self._sums = _Sums()
        self._usual: LatencyWindow | None = None
        self._change: _Change | None = None
        self._asked: _Change | None = None
        self._hold = HOLD_WINDOWS

    def observe(self, counts: StageCounts, num_new: float, elapsed_s: float) -> None:
        """Adds a sample.

        Args:
            num_new: arrivals since the last call; a fraction where groups share a scenario.
            elapsed_s: seconds since the last call.
        """
        sums = self._sums
        sums.wait_prefill += counts.waiting.prefill * elapsed_s
        sums.wait_decode += counts.waiting.decode * elapsed_s
        sums.prefill += counts.prefilling * elapsed_s
        sums.decode += counts.decoding * elapsed_s
        sums.count += num_new

    def note_prompts(self, lengths: MeanLengths, count: float = 1.0) -> None:
        """Adds the lengths of requests that arrived; a fraction where groups share a scenario."""
        sums = self._sums
        sums.uncached_tokens += lengths.uncached * count
        sums.prompt_tokens += lengths.prompt * count
        sums.output_tokens += lengths.output * count
        sums.noted += count

    @property
    def lengths(self) -> MeanLengths | None:
        """Mean lengths of the window's requests; None without any."""
        sums = self._sums
        if not sums.noted:
            return None
        return MeanLengths(
            sums.uncached_tokens / sums.noted,
            sums.prompt_tokens / sums.noted,
            sums.output_tokens / sums.noted,
        )

    def end_window(
        self, num_prefill: int, num_decode: int, profile: InstanceProfile | None = None
    ) -> RatioStep | None:
        """Ends the window and returns the step that the rule asks for.

        None if the window has too few requests; it is then extended. The caller that carries out
        the step calls `carried_out`, so that only a real change is judged by later windows.

        Args:
            profile: measured speeds of both roles under the window's load, which eq. 1 reads; None
                while they are not known.
        """
        sums = self._sums
        if sums.count < MIN_REQUESTS:
            return None
        self._sums = _Sums()
        self._asked = None
        now, quiet = sums.window(), sums.quiet_window()
        # The relative error of a mean of n counts is about 1 / sqrt(n).
        tolerance = max(TOLERANCE, 1.0 / math.sqrt(sums.count))
        waited = now.total_s > (1.0 + max(tolerance, WAITING)) * quiet.total_s
        # A request that is refused in the end has only waited. It lowers the mean of the other
        # times below the usual, so a window with waiting is compared with itself.
        before, seen = (quiet, now) if waited else (self._usual or quiet, quiet)
        if not waited:
            self._usual = _moved(before, quiet)
        change = self._aged_change()
        if change is not None and change.age <= SETTLE_WINDOWS:
            return RatioStep(None, RatioReason.SETTLING)
        step = ratio_direction(before, seen, num_prefill, num_decode, tolerance)
        if profile is not None and (step.grow or step.reason is RatioReason.UNCLEAR):
            by_rate = step_by_rate(profile, num_prefill, num_decode)
            if by_rate is not None and step.grow in (None, by_rate.grow):
                return self._ask(by_rate, now, quiet, waited=waited)
        goes_back = change is not None and step.grow not in (None, change.grow)
        if change is not None and goes_back and change.age <= self._hold:
            worse = ratio_direction(change.before, now, num_prefill, num_decode, tolerance)
            if worse.grow is not step.grow:
                return RatioStep(None, RatioReason.HOLD)
            step = RatioStep(step.grow, RatioReason.TAKEN_BACK)
        if profile is not None:
            step = checked_step(step, profile, num_prefill, num_decode)
        return self._ask(step, now, quiet, waited=waited)

    def _ask(
        self, step: RatioStep, now: LatencyWindow, quiet: LatencyWindow, *, waited: bool
    ) -> RatioStep:
        """Remembers a step until it is carried out; returns it."""
        if step.grow is not None:
            if not waited:
                self._usual = quiet  # one change answers this latency; only a higher one asks again
            self._asked = _Change(step.grow, now)
        return step

    def carried_out(self) -> None:
        """Records that an instance changes to the role that the last window asked for."""
        before, asked = self._change, self._asked
        if asked is None:
            return
        if before is not None and before.grow is not asked.grow:
            self._hold = min(2 * self._hold, MAX_HOLD_WINDOWS)
        self._change, self._asked = asked, None

    def _aged_change(self) -> _Change | None:
        """Returns the last change, one window older; drops it after twice the hold."""
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
