from __future__ import annotations

from benchmarks.policies_capacity import INFINITE, SIZES, capacity


def test_more_memory_below_pools_finds_more_where_pools_are_too_small() -> None:
    """The same numbers on every machine: time is virtual."""
    sessions, one_turn = capacity([], 0.3, seed=1)
    rows = {job.label: job.run().row for job in sessions.jobs}
    assert set(rows) == {*SIZES, INFINITE}
    hits = {label: row["hits"] for label, row in rows.items()}
    assert hits["pool alone"] < hits["host 10x"] <= hits[INFINITE]
    assert rows["host 10x"]["loaded blocks"] > 0 == rows["pool alone"]["loaded blocks"]
    assert len(sessions.judge(rows).targets) == 2
    rows = {job.label: job.run().row for job in one_turn.jobs}
    assert {row["hits"] for row in rows.values()} == {0}
    (target,) = one_turn.judge(rows).targets
    assert target.as_row()["met"]
