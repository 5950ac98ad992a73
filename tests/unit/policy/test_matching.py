from __future__ import annotations

import math
import random

import pytest
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

from kvmesh.policy.matching import least_total


def total(costs: list[list[float]], chosen: list[int]) -> float:
    return sum(row[column] for row, column in zip(costs, chosen, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_it_costs_no_more_than_any_other_assignment(seed: int) -> None:
    draw = random.Random(seed)
    rows = draw.randrange(1, 8)
    columns = rows + draw.randrange(0, 8)
    # Few different numbers, so that many assignments cost the same.
    costs = [[float(draw.randrange(-5, 12)) for _ in range(columns)] for _ in range(rows)]
    chosen = least_total(costs)
    assert len(set(chosen)) == rows
    best_rows, best_columns = linear_sum_assignment(costs)
    best = [columns for _, columns in sorted(zip(best_rows, best_columns, strict=True))]
    assert total(costs, chosen) == pytest.approx(total(costs, [int(each) for each in best]))


def test_nothing_to_assign() -> None:
    assert least_total([]) == []


def test_what_is_impossible_is_chosen_last() -> None:
    assert least_total([[math.inf, 5.0, 1.0], [math.inf, 1.0, math.inf]]) == [2, 1]
    assert sorted(least_total([[math.inf, 3.0], [math.inf, 2.0]])) == [0, 1]


def test_the_choice_of_one_gives_way_to_another() -> None:
    """The first row likes column 0 best, but the second has nothing else."""
    assert least_total([[1.0, 2.0], [1.0, 50.0]]) == [1, 0]


def test_more_rows_than_columns_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="2 rows for 1 columns"):
        least_total([[1.0], [2.0]])
