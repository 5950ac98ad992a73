from __future__ import annotations

import pytest

from kvmesh.policy.curves import Interpolated

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
