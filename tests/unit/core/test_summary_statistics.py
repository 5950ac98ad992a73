from __future__ import annotations

import math
import statistics

import pytest

from kvmesh.core.summary_statistics import coefficient_of_variation, mean, percentile


@pytest.mark.parametrize("percent", [0, 1, 25, 50, 90, 99, 100])
def test_percentiles_are_those_of_the_standard_library(percent: int) -> None:
    values = [5.0, 1.0, 9.0, 2.0, 2.0, 7.5]
    cuts = [min(values), *statistics.quantiles(values, n=100, method="inclusive"), max(values)]
    assert percentile(values, percent) == pytest.approx(cuts[percent])


def test_percentiles_of_little() -> None:
    assert math.isnan(percentile([], 50))
    assert percentile([3.0], 99) == 3.0


def test_mean() -> None:
    assert mean([]) == 0
    assert mean([1, 2, 6]) == 3


def test_variation() -> None:
    assert coefficient_of_variation([]) == 0
    assert coefficient_of_variation([5, 5, 5]) == 0
    assert coefficient_of_variation([0, 0]) == 0
    assert coefficient_of_variation([0, 2]) == 1
    assert coefficient_of_variation([1, 0, 0, 0]) == pytest.approx(math.sqrt(3))
