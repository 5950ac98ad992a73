"""Distributions of prompt lengths for throughput models: fractions and means above and below a
threshold. Tests: tests/unit/policy/test_lengths.py.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from statistics import NormalDist


class LengthDistribution:
    """Empirical distribution: equally likely lengths in tokens.

    Raises:
        ValueError: there is no length, or one is negative.
    """

    def __init__(self, lengths: Iterable[float]) -> None:
        self._sorted = sorted(lengths)
        if not self._sorted or self._sorted[0] < 0:
            raise ValueError("a distribution needs at least one length and none below zero")
        self._sums = [0.0, *accumulate(self._sorted)]

    @classmethod
    def log_normal(
        cls, mu: float, sigma: float, low: float, high: float, num_points: int = 20_000
    ) -> LengthDistribution:
        """Returns a log-normal distribution cut to [low, high], as its midpoint quantiles.

        Args:
            mu, sigma: mean and deviation of the logarithm of the length in tokens.
            num_points: number of quantiles; more follow the curve closer.

        Raises:
            ValueError: the bounds are wrong, or no probability lies between them.
        """
        if not 0 < low < high:
            raise ValueError(f"bounds must rise and be positive, not {low} and {high}")
        log_length = NormalDist(mu, sigma)
        bottom, top = log_length.cdf(math.log(low)), log_length.cdf(math.log(high))
        if top <= bottom:
            raise ValueError(f"nothing of the distribution lies within {low} and {high}")
        step = (top - bottom) / num_points
        shares = (bottom + (index + 0.5) * step for index in range(num_points))
        return cls(math.exp(log_length.inv_cdf(share)) for share in shares)

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def mean(self) -> float:
        """Mean length."""
        return self._sums[-1] / len(self._sorted)

    def quantile(self, share: float) -> float:
        """Returns the length that a fraction `share` (0..1) of all lengths do not exceed."""
        index = min(int(share * len(self._sorted)), len(self._sorted) - 1)
        return self._sorted[index]

    def share_above(self, threshold: float) -> float:
        """Returns P(L > threshold)."""
        return 1.0 - self._count_to(threshold) / len(self._sorted)

    def mean_above(self, threshold: float) -> float:
        """Returns E[L | L > threshold]; 0 if no length is above."""
        count = self._count_to(threshold)
        above = len(self._sorted) - count
        return (self._sums[-1] - self._sums[count]) / above if above else 0.0

    def mean_to(self, threshold: float) -> float:
        """Returns E[L | L <= threshold]; 0 if there is no such length."""
        count = self._count_to(threshold)
        return self._sums[count] / count if count else 0.0

    def _count_to(self, threshold: float) -> int:
        return bisect_right(self._sorted, threshold)
