"""Times between the tokens of all answers of a run, as a histogram.

Tests: tests/unit/sim/test_gaps.py.
"""

from __future__ import annotations

import math
from collections import Counter

_PER_E_FOLD = 50
"""Bins of 2 % each: a run has millions of tokens."""


class Gaps:
    """How often which time passed between one token of an answer and the next."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def add(self, seconds: float, count: int) -> None:
        """So many answers waited so long for their next token."""
        if count and seconds > 0.0:
            self._bins[math.floor(math.log(seconds) * _PER_E_FOLD)] += count

    def merge(self, others: Gaps) -> None:
        """Takes the counts of others into account."""
        self._bins.update(others._bins)

    def percentile(self, percent: float) -> float:
        """Seconds within 2 %; NaN without any token."""
        left = sum(self._bins.values()) * percent / 100
        if not left:
            return math.nan
        for number in sorted(self._bins):
            left -= self._bins[number]
            if left <= 0:
                return math.exp((number + 0.5) / _PER_E_FOLD)
        return math.exp((max(self._bins) + 0.5) / _PER_E_FOLD)
