"""Summary statistics of reports, defined once, so that the simulator's results, load measurements
and the console can be compared.

Tests: tests/unit/core/test_summary_statistics.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the value below which `percent` of all lie, in their unit; NaN without values.

    It interpolates linearly between the two nearest ranks, as `numpy.percentile` does, which vLLM's
    and other load generators use.

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
    """Returns the arithmetic mean; 0 without values."""
    return sum(values) / len(values) if values else 0.0


def coefficient_of_variation(values: Sequence[float]) -> float:
    """Returns standard deviation over mean; 0 if the mean is 0."""
    middle = mean(values)
    if middle == 0:
        return 0.0
    return math.sqrt(mean([(value - middle) ** 2 for value in values])) / middle
