from __future__ import annotations

import pytest

from kvmesh.policy.curves import Interpolated, Quadratic, fit_quadratic

LINE = Interpolated(((10, 1.0), (20, 3.0), (40, 4.0)))


@pytest.mark.parametrize(
    ("length", "value"),
    [(10, 1.0), (15, 2.0), (20, 3.0), (30, 3.5), (40, 4.0), (60, 5.0), (5, 0.0), (0, 0.0)],
)
def test_straight_lines_through_the_points_and_beyond(length: float, value: float) -> None:
    assert LINE(length) == pytest.approx(value)


@pytest.mark.parametrize(
    "points",
    [((1, 1.0),), ((1, 1.0), (1, 2.0)), ((2, 1.0), (1, 2.0)), ((1, 1.0), (3, 2.0), (2, 3.0))],
)
def test_points_must_rise(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="rising"):
        Interpolated(points)


def test_a_quadratic_is_found_again() -> None:
    curve = Quadratic(0.5, 1e-4, 3e-10)
    found = fit_quadratic([(n, curve(n)) for n in (128, 1024, 8192, 32768, 131072)])
    assert found.constant == pytest.approx(0.5)
    assert found.linear == pytest.approx(1e-4)
    assert found.square == pytest.approx(3e-10)


def test_two_lengths_make_no_quadratic() -> None:
    with pytest.raises(ValueError, match="three"):
        fit_quadratic([(1, 1.0), (2, 2.0), (2, 2.1)])


def test_three_lengths_are_enough_and_their_order_means_nothing() -> None:
    curve = Quadratic(2.0, -3.0, 0.25)
    found = fit_quadratic([(n, curve(n)) for n in (40, -8, 0)])
    assert (found.constant, found.linear, found.square) == pytest.approx((2.0, -3.0, 0.25))
