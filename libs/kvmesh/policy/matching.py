"""Solves the assignment problem: one column for each row at the least total cost. Pure, without
numpy: the scheduler's image has none, and its matrices are small.

Source: the Hungarian method with potentials (Kuhn 1955, Munkres 1957).
Tests: tests/unit/policy/test_matching.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def least_total(costs: Sequence[Sequence[float]]) -> list[int]:
    """Chooses a column for every row, no column twice, O(rows^2 columns).

    Args:
        costs: a matrix with at least as many columns as rows, without NaN. Infinite entries are
            chosen only where no other is left.

    Returns:
        The column of each row.
    """
    num_rows = len(costs)
    if not num_rows:
        return []
    num_columns = len(costs[0])
    assert num_rows <= num_columns, f"{num_rows} rows for {num_columns} columns"
    rows = _finite(costs)
    row_of = [-1] * num_columns
    by_row = [0.0] * num_rows
    by_column = [0.0] * num_columns
    for row in range(num_rows):
        _take_in(row, rows, row_of, by_row, by_column)
    chosen = [-1] * num_rows
    for column, row in enumerate(row_of):
        if row >= 0:
            chosen[row] = column
    return chosen


def _finite(costs: Sequence[Sequence[float]]) -> list[list[float]]:
    """Replaces infinite costs by a number that outweighs all finite ones together."""
    listed = [list(row) for row in costs]
    largest = max((abs(cost) for row in listed for cost in row if cost < math.inf), default=0.0)
    never = (largest + 1.0) * 4 * len(listed)
    return [[min(cost, never) for cost in row] for row in listed]


def _take_in(
    new: int,
    costs: list[list[float]],
    row_of: list[int],
    by_row: list[float],
    by_column: list[float],
) -> None:
    """Assigns one more row along the cheapest path of reassignments; potentials stay feasible."""
    num_columns = len(row_of)
    slack = [math.inf] * num_columns
    before = [-1] * num_columns
    left = list(range(num_columns))
    reached: list[int] = []
    row, column = new, -1
    while True:
        own, potential = costs[row], by_row[row]
        step, nearest = math.inf, -1
        for each in left:
            reduced = own[each] - potential - by_column[each]
            if reduced < slack[each]:
                slack[each] = reduced
                before[each] = column
            if slack[each] < step:
                step, nearest = slack[each], each
        by_row[new] += step
        for each in reached:
            by_row[row_of[each]] += step
            by_column[each] -= step
        for each in left:
            slack[each] -= step
        column = nearest
        left.remove(column)
        reached.append(column)
        row = row_of[column]
        if row < 0:
            break
    while column >= 0:
        previous = before[column]
        row_of[column] = new if previous < 0 else row_of[previous]
        column = previous
