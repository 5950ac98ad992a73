"""What needs no processes of the rounds of two routers: meshes, ratios, verdicts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.result import Row
from benchmarks.tier_load import ALONE, LIMIT, LOADS, TIERED
from benchmarks.tier_rounds import (
    CASES,
    LONG,
    OURS,
    ROUNDS,
    THEIRS,
    UNIT_S,
    UNTOLD,
    flags_of,
    mean_ratio,
    ratios,
    summaries,
    targets,
)

COUNTS = {"requests": 50, "failed": 1}
NUMBERS = dict.fromkeys(("hit rate", "TTFT p50", "TTFT p99", "good"), 0.5)


def rows_of(load: str, form: str, by_round: list[tuple[float, float]]) -> list[Row]:
    """Goodput of ours and theirs in each round; the order of the two turns round."""
    found: list[Row] = []
    for number, goodputs in enumerate(by_round, start=1):
        pair = list(zip((OURS, THEIRS), goodputs, strict=True))
        for router, goodput in pair if number % 2 else reversed(pair):
            row = {"router": router, "round": number, "load": load, "form": form, "seconds": 10.0}
            found.append({**row, "goodput/s": goodput, **COUNTS, **NUMBERS})
    return found


def everywhere(by_round: list[tuple[float, float]]) -> list[Row]:
    return [row for load in LOADS[:2] for form in CASES for row in rows_of(load, form, by_round)]


def test_meshes_of_a_pair_differ_by_the_router_alone() -> None:
    for name, case in CASES.items():
        ours, theirs = (
            flags_of(case, router, Path("profile"), Path("folder")) for router in (OURS, THEIRS)
        )
        told = LONG if name == UNTOLD else LIMIT
        assert ours["gateway"] == {"limits.ttft-deadline-ms": 1e3 * told * UNIT_S}
        assert ours.pop("scheduler") == {"routing.policy": OURS}
        assert theirs.pop("scheduler") == {"routing.policy": THEIRS}
        assert ours == theirs
        assert ("tiers.host-gib" in ours["prefill"]) == (name == TIERED)


def test_ratios_are_those_of_equal_loads() -> None:
    rows = rows_of("sessions", ALONE, [(2.0, 1.0), (0.3, 0.6)])
    assert ratios(rows, "sessions", ALONE) == [2.0, 0.5]
    assert ratios(rows, "sessions", TIERED) == []
    assert ratios(rows_of("sessions", ALONE, [(0.5, 0.0)]), "sessions", ALONE) == [10.0]


def test_neither_of_two_equal_systems_is_ahead() -> None:
    """The arithmetic mean of these ratios is 1.25, whichever system is the dividend."""
    mean = mean_ratio([2.0, 0.5])
    assert mean.middle == pytest.approx(1.0)
    assert mean.low * mean.high == pytest.approx(1.0)
    assert mean_ratio([0.7]).low == mean_ratio([0.7]).high == pytest.approx(0.7)


def test_the_rounds_decide_what_they_are_to_decide() -> None:
    """With a spread of 0.14 from round to round, as pools alone have."""
    draw = random.Random(1)

    def low(ratio: float) -> float:
        return mean_ratio([ratio * 2 ** draw.gauss(0.0, 0.2) for _ in range(ROUNDS)]).low

    equal, worse = ([low(ratio) >= CASES[ALONE].least for _ in range(200)] for ratio in (1.0, 0.88))
    assert sum(equal) > 0.7 * 200
    assert sum(worse) < 0.05 * 200


def test_the_lower_end_is_judged() -> None:
    verdicts = {each.name: each for each in targets(everywhere([(0.93, 1.0)] * 4))}
    assert [each.met for each in verdicts.values()] == [True, True, False] * 2
    wide = targets(everywhere([(2.0, 1.0), (1.0, 2.0), (2.0, 1.0)]))
    assert not any(each.met for each in wide), "a mean of 1.26, which three rounds do not hold up"
    assert [each.met for each in targets(everywhere([(9.0, 1.0)]))] == [None] * 6


def test_the_table_says_how_wide_the_interval_is() -> None:
    ours, theirs, compared = summaries(
        rows_of("sessions", ALONE, [(1.1, 1.0), (0.9, 1.0), (1.0, 1.0)])
    )
    assert (ours["router"], ours["requests"], ours["failed"]) == (OURS, 150, 3)
    assert theirs["goodput/s"] == {"min": 1.0, "median": 1.0, "max": 1.0}
    assert compared["goodput ratio"] == {"min": 0.9, "median": 1.0, "max": 1.1}
    assert compared["by round"] == "1.10 0.90 1.00"
    low, high = (float(each) for each in compared["95 %"].split(" to "))
    assert low < 0.9 < compared["mean"] < 1.1 < high
