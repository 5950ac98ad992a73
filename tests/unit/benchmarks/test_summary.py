"""The page of all results."""

from __future__ import annotations

from benchmarks.summary import summary


def test_counts_targets_and_names_the_missed_ones() -> None:
    common = {"date": "2026-05-01T10:00:00+00:00", "commit": "abc"}
    page = summary(
        {
            "engine": common
            | {
                "targets": [
                    {"name": "decode", "value": 2.0, "goal": 1.15, "met": True},
                    {"name": "prefill", "value": 1.1, "goal": 1.15, "met": False},
                ]
            },
            "serve": common
            | {"targets": [{"name": "p99", "value": None, "goal": "<= 3", "met": None}]},
            "sim": common,
        }
    )
    assert "| [engine](engine.md) | 2026-05-01 | abc | 1 of 2 | `make bench-engine` |" in page
    assert "| [sim](sim.md) | 2026-05-01 | abc | – | `make bench-sim` |" in page
    assert page.endswith("| engine | prefill | 1.1 | >= 1.15 |\n| serve | p99 | – | <= 3 |\n")
