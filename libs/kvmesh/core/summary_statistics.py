"""Summary statistics of reports: one definition of each, so that what the simulator says, what a
load measured and what the console shows can be compared. Tests:
tests/unit/core/test_summary_statistics.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of all lie below, in their unit; NaN of no values.

    Between the two nearest ranks it is interpolated linearly, as `numpy.percentile` does, with
    which vLLM's and others' load generators report.

    Args:
        values: in any order.
        percent: 0 to 100.
    """
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; 0 of no values."""
    return sum(values) / len(values) if values else 0.0


def coefficient_of_variation(values: Sequence[float]) -> float:
    """Standard deviation over mean; 0 when all are 0."""
    middle = mean(values)
    if middle == 0:
        return 0.0
    return math.sqrt(mean([(value - middle) ** 2 for value in values])) / middle
