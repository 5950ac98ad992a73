from __future__ import annotations

from benchmarks.policies_capacity import (
    FACTORS,
    FLEET_DECIDES,
    INFINITE,
    SIZES,
    _judge_loads,
    by_fleet,
    capacity,
)
from benchmarks.result import Row


def test_more_memory_below_pools_finds_more_where_pools_are_too_small() -> None:
    """The same numbers on every machine: time is virtual."""
    sessions, one_turn = capacity([], 0.3, seed=1)
    rows = {job.label: job.run().row for job in sessions.jobs}
    assert set(rows) == {*SIZES, *map(by_fleet, FLEET_DECIDES), INFINITE}
    hits = {label: row["hits"] for label, row in rows.items()}
    assert hits["pool alone"] < hits["host 10x"] <= hits[INFINITE]
    assert rows["host 10x"]["loaded blocks"] > 0 == rows["pool alone"]["loaded blocks"]
    assert len(sessions.judge(rows).targets) == 2
    rows = {job.label: job.run().row for job in one_turn.jobs}
    assert {row["hits"] for row in rows.values()} == {0}
    (target,) = one_turn.judge(rows).targets
    assert target.as_row()["met"]


def test_the_rate_that_is_borne_is_the_last_one_with_nine_of_ten_in_time() -> None:
    borne = {"pool alone": 0.8, "host 10x": 1.6}
    rows: dict[str, Row] = {
        f"{factor:g}x {label}": {"success": 0.95 if factor <= most else 0.85, "hits": 0.9}
        for label, most in borne.items()
        for factor in FACTORS
    }
    rows[f"1x {INFINITE}"] = {"hits": 1.0}
    borne_more, hits = _judge_loads("a trace", 10.0, rows).targets
    assert (borne_more.value, borne_more.met) == (2.0, True)
    assert (hits.value, hits.met) == (0.9, True)
