"""A histogram for what happens with every request and every token.

`Histogram.observe` looks at one bucket after the other and costs 3 us. Here the bucket is found by
bisection, and observations that were gathered are added in one go.
Tests: tests/unit/telemetry/test_batch_histogram.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client import Histogram


class BatchHistogram(Histogram):
    """A histogram that also takes many observations at once."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Adds one observation."""
        if exemplar is not None:
            super().observe(amount, exemplar)
            return
        self._sum.inc(amount)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)

    def observe_all(self, amounts: Iterable[float]) -> None:
        """Adds observations, as one by one but with one step per bucket."""
        bounds, counts, total = self._upper_bounds, dict[int, int](), 0.0
        for amount in amounts:
            number = bisect_left(bounds, amount)
            counts[number] = counts.get(number, 0) + 1
            total += amount
        for number, count in counts.items():
            self._buckets[number].inc(count)
        if counts:
            self._sum.inc(total)
