from __future__ import annotations

from typing import Any

import pytest

from benchmarks.live_rounds import gain, order, round_seed, summaries


def row(number: int, system: str, goodput: float) -> dict[str, Any]:
    names = ("refused", "TTFT p50", "TTFT p90", "TPOT p50", "good")
    return {
        "part": "it", "round": number, "system": system, "goodput/s": goodput,
        **dict.fromkeys(names, goodput),
    }  # fmt: skip


ROWS = [
    row(1, "fixed", 4.0), row(1, "moving", 5.0),
    row(2, "moving", 2.2), row(2, "fixed", 2.0),
    row(3, "fixed", 8.0), row(3, "moving", 4.0),
]  # fmt: skip


def test_gain_compares_within_rounds() -> None:
    """A hard load counts as much as an easy one, and one bad round decides nothing."""
    assert gain(ROWS, "moving", "fixed") == pytest.approx(1.1)
    assert gain(ROWS + summaries(ROWS), "moving", "fixed") == pytest.approx(1.1)
    assert gain([row(1, "fixed", 0.0), row(1, "moving", 1.0)], "moving", "fixed") > 100


def test_each_system_has_the_spread_of_its_rounds() -> None:
    fixed, moving = summaries(ROWS)
    assert (fixed["system"], fixed["round"]) == ("fixed", "all")
    assert fixed["goodput/s"] == {"min": 2.0, "median": 4.0, "max": 8.0}
    assert moving["TTFT p90"] == {"min": 2.2, "median": 4.0, "max": 5.0}


def test_who_is_first_in_one_round_is_last_in_the_next() -> None:
    assert order(["a", "b", "c"], 0) == ["a", "b", "c"]
    assert order(["a", "b", "c"], 1) == ["c", "b", "a"]


def test_no_two_rounds_have_the_same_load() -> None:
    assert len({round_seed(seed, number) for seed in range(5) for number in range(3)}) == 15
