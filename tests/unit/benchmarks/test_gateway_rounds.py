"""Rounds of the gateway bench: what one row says of several."""

from __future__ import annotations

from benchmarks.gateway_rounds import in_order, median_row
from benchmarks.result import Row


def _round(per_s: int, p50: float | None, failed: int) -> Row:
    return {"system": "a", "what": "b", "per s": per_s, "p50 ms": p50, "failed": failed}


def test_a_row_is_the_median_of_its_rounds_and_the_worst_of_failures() -> None:
    row = median_row([_round(100, 1.5, 0), _round(300, 0.5, 2), _round(200, 9.0, 0)], "per s")
    expected = {**_round(200, 1.5, 2), "spread %": 100}
    assert row == expected


def test_what_no_round_measured_is_not_made_up() -> None:
    row = median_row([_round(0, None, 3), _round(0, None, 1)], "p50 ms")
    assert row == _round(0, None, 3)


def test_a_median_of_two_is_as_precise_as_they_are() -> None:
    row = median_row([_round(100, 1.25, 0), _round(103, 1.5, 0)], "p50 ms")
    assert (row["per s"], row["p50 ms"], row["spread %"]) == (102, 1.38, 18)


def test_one_round_has_no_spread() -> None:
    assert median_row([_round(100, 1.5, 0)], "per s") == _round(100, 1.5, 0)


def test_each_round_begins_with_another_system_and_holds_all() -> None:
    systems = [f"s{number}" for number in range(7)]
    orders = [in_order(systems, number, 3) for number in range(3)]
    assert all(sorted(order) == systems for order in orders)
    assert len({order[0] for order in orders}) == 3
    assert in_order(systems, 0, 1) == systems
