"""Histogram of the times between tokens of all answers of a run.

Tests: tests/unit/sim/test_gaps.py.
"""

from __future__ import annotations

import math
from collections import Counter

_PER_E_FOLD = 50
"""Number of bins per factor e, so bins of 2 %: a run has too many tokens to keep each time."""


class Gaps:
    """Counts of the times between one token of an answer and the next."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def add(self, seconds: float, count: int) -> None:
        """Adds `count` gaps of this many seconds."""
        if count and seconds > 0.0:
            self._bins[math.floor(math.log(seconds) * _PER_E_FOLD)] += count

    def merge(self, others: Gaps) -> None:
        """Adds the counts of another histogram."""
        self._bins.update(others._bins)

    def percentile(self, percent: float) -> float:
        """Returns a percentile in seconds, within 2 %; NaN without gaps."""
        left = sum(self._bins.values()) * percent / 100
        if not left:
            return math.nan
        for number in sorted(self._bins):
            left -= self._bins[number]
            if left <= 0:
                return math.exp((number + 0.5) / _PER_E_FOLD)
        return math.exp((max(self._bins) + 0.5) / _PER_E_FOLD)
