from __future__ import annotations

from typing import Any

from benchmarks.prefix_fetch import targets


def row(channel: str, prefix: int, fetched_ms: float) -> dict[str, Any]:
    def middle(value: float) -> dict[str, float]:
        return {"min": value, "median": value, "max": value}

    return {
        "channel": channel,
        "prefix": prefix,
        "fetched_ms": middle(fetched_ms),
        "computed_ms": middle(100.0),
    }


def test_the_worst_length_of_a_channel_counts() -> None:
    rows = [row("shm", 2048, 10.0), row("shm", 8192, 30.0)]
    shm, tcp = (each.as_row() for each in targets(rows))
    assert (shm["value"], shm["met"]) == (0.3, False)
    assert (tcp["value"], tcp["met"]) == (None, None)
