"""Measured time of calls that take a constant time and a time that grows with their size. Pure.

A mean of seconds per unit would count the constant part as if it grew too, so that one small call
would make large ones look far too slow.
Tests: tests/unit/policy/test_linear_time.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.policy.preemption import FADING, SAMPLE_WEIGHT

_MOST_RATIO = 10.0


@dataclass(frozen=True, slots=True)
class LinearTime:
    """Time of one kind of calls.

    Attributes:
        call_s: seconds of a call of any size.
        unit_s: seconds per unit of size.
    """

    call_s: float
    unit_s: float

    def estimate_s(self, num_calls: int, num_units: int) -> float:
        """Returns the seconds of so many calls with so many units in total."""
        return num_calls * self.call_s + num_units * self.unit_s

    def with_sample(self, num_units: int, seconds: float) -> LinearTime:
        """Returns the time after one more measured call.

        The larger part of the estimate is corrected more.
        """
        work_s = num_units * self.unit_s
        expected_s = self.call_s + work_s
        ratio = min(max(seconds / expected_s, 1 / _MOST_RATIO), _MOST_RATIO)
        step = SAMPLE_WEIGHT * (ratio - 1)
        share = work_s / expected_s
        return LinearTime(self.call_s * (1 + step * (1 - share)), self.unit_s * (1 + step * share))

    def without_call(self) -> LinearTime:
        """Returns the time after a decision against a call; see `preemption.without_copy`."""
        return LinearTime(self.call_s * (1 - FADING), self.unit_s * (1 - FADING))
