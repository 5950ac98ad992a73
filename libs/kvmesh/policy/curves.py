"""Curves of a cost over a length, such as seconds of prefill or bytes of KV, read from profiles.

Tests: tests/unit/policy/test_curves.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

Curve = Callable[[float], float]
"""Function from tokens to seconds or bytes."""


@dataclass(frozen=True, slots=True)
class Interpolated:
    """Linear interpolation of measured points; the outer lines extrapolate beyond the ends.

    Attributes:
        points: (tokens, value), at least two, tokens strictly rising.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        lengths = [length for length, _ in self.points]
        if len(lengths) < 2 or any(b <= a for a, b in pairwise(lengths)):
            raise ValueError(f"a curve needs two or more points of rising length, not {lengths}")

    def __call__(self, length: float) -> float:
        """Returns the value at `length`; never negative."""
        # The segment that contains the length, or the outermost one.
        index = bisect_right(self.points, (length, float("inf")))
        index = min(max(index, 1), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[index - 1], self.points[index]
        return max(y0 + (y1 - y0) * (length - x0) / (x1 - x0), 0.0)


@dataclass(frozen=True, slots=True)
class Quadratic:
    """`constant + linear * l + square * l**2`: the shape that attention gives to prefill time."""

    constant: float
    linear: float
    square: float = 0.0

    def __call__(self, length: float) -> float:
        """Returns the value at `length`."""
        return self.constant + length * (self.linear + length * self.square)


@dataclass(frozen=True, slots=True)
class Scaled:
    """A curve of known shape at a measured speed: `factor * curve(l)`."""

    curve: Curve
    factor: float

    def __call__(self, length: float) -> float:
        """Returns the value at `length`."""
        return self.factor * self.curve(length)
