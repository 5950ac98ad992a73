from __future__ import annotations

import math

import pytest

from kvmesh.policy.lengths import LengthDistribution


def test_parts_around_a_threshold() -> None:
    lengths = LengthDistribution([40, 10, 20, 30])
    assert lengths.mean == 25
    assert lengths.share_above(20) == 0.5
    assert lengths.mean_above(20) == 35
    assert lengths.mean_to(20) == 15
    assert (lengths.share_above(40), lengths.mean_above(40)) == (0, 0)
    assert (lengths.share_above(9), lengths.mean_to(9)) == (1, 0)


def test_the_parts_make_the_whole() -> None:
    lengths = LengthDistribution.log_normal(9.9, 1.0, 128, 131_072)
    for threshold in (500, 5_000, 19_400, 100_000):
        share = lengths.share_above(threshold)
        whole = share * lengths.mean_above(threshold) + (1 - share) * lengths.mean_to(threshold)
        assert whole == pytest.approx(lengths.mean)


def test_the_case_studys_lengths() -> None:
    """PrfaaS 4.1: the integrals of the cut log-normal distribution, by another method."""
    lengths = LengthDistribution.log_normal(9.9, 1.0, 128, 131_072)
    assert lengths.mean == pytest.approx(27_485.7, rel=1e-3)
    assert lengths.share_above(19_400) == pytest.approx(0.49572, rel=1e-3)
    assert lengths.mean_above(19_400) == pytest.approx(45_045.6, rel=1e-3)
    assert lengths.mean_to(19_400) == pytest.approx(10_223.6, rel=1e-3)
    assert lengths.quantile(0.9) == pytest.approx(62_410, rel=1e-3)


def test_the_cut_holds() -> None:
    lengths = LengthDistribution.log_normal(9.9, 1.0, 128, 131_072)
    assert lengths.quantile(0.0) >= 128
    assert lengths.quantile(1.0) <= 131_072
    assert lengths.share_above(math.inf) == 0


@pytest.mark.parametrize("values", [[], [-1.0]])
def test_lengths_that_are_none(values: list[float]) -> None:
    with pytest.raises(ValueError, match="length"):
        LengthDistribution(values)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2, 2), (1e200, 1e201)])
def test_bounds_that_leave_nothing(low: float, high: float) -> None:
    with pytest.raises(ValueError, match=r"bounds|nothing"):
        LengthDistribution.log_normal(9.9, 1.0, low, high)
