"""How a cost grows with a length: seconds of prefill, bytes of KV. Read from profiles.

Tests: tests/unit/policy/test_curves.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Curve = Callable[[float], float]
"""Tokens to seconds or bytes."""


@dataclass(frozen=True, slots=True)
class Interpolated:
    """Straight lines through measured points; the outer ones go on beyond the ends.

    Attributes:
        points: (tokens, value), at least two, tokens strictly rising.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        lengths = [length for length, _ in self.points]
        if len(lengths) < 2 or any(b <= a for a, b in pairwise(lengths)):
            raise ValueError(f"a curve needs two or more points of rising length, not {lengths}")

    def __call__(self, length: float) -> float:
        """The value at `length`; never negative."""
        # The segment that holds the length, or the outermost one.
        index = bisect_right(self.points, (length, float("inf")))
        index = min(max(index, 1), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[index - 1], self.points[index]
        return max(y0 + (y1 - y0) * (length - x0) / (x1 - x0), 0.0)


@dataclass(frozen=True, slots=True)
class Quadratic:
    """`constant + linear * l + square * l**2`: what attention makes of prefill time."""

    constant: float
    linear: float
    square: float = 0.0

    def __call__(self, length: float) -> float:
        """The value at `length`."""
        return self.constant + length * (self.linear + length * self.square)


def fit_quadratic(samples: Sequence[tuple[float, float]]) -> Quadratic:
    """The quadratic of least squares through samples of (tokens, value).

    Raises:
        ValueError: fewer than three different lengths.
    """
    if len({length for length, _ in samples}) < 3:
        raise ValueError("a quadratic needs samples of three different lengths")
    # Lengths are scaled to 0..1, or their fourth powers would drown the rest.
    scale = max(abs(length) for length, _ in samples)
    scaled = [(length / scale, value) for length, value in samples]
    power = [sum(x**n for x, _ in scaled) for n in range(5)]
    rows = [
        [power[i], power[i + 1], power[i + 2], sum(y * x**i for x, y in scaled)] for i in range(3)
    ]
    constant, linear, square = _solve(rows)
    return Quadratic(constant, linear / scale, square / scale**2)


def _solve(rows: list[list[float]]) -> list[float]:
    """Solves a small linear system, given as rows that end with the right side."""
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(size):
            if row != column:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[column], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]
