from __future__ import annotations

from typing import Any

from benchmarks.query_report import LAYER, PROMPT, notes, targets


def middle(value: float) -> dict[str, float]:
    return {"min": value, "median": value, "max": value}


def row(what: str, new: int, prefix: int, **columns: float) -> dict[str, Any]:
    values = {name: middle(value) for name, value in columns.items()}
    return {"what": what, "channel": "shm", "new": new, "prefix": prefix, **values}


ROWS = [
    row(LAYER, 1, 256, ask_ms=0.75, attend_ms=0.25),
    row(LAYER, 1, 4096, ask_ms=9.0, attend_ms=1.0),
    row(PROMPT, 16, 4096, asked_ms=10.0, fetched_ms=30.0, computed_ms=100.0),
    row(PROMPT, 64, 4096, asked_ms=50.0, fetched_ms=30.0, computed_ms=100.0),
]


def test_goals_are_of_the_shortest_question_and_the_longest_prefix() -> None:
    found = {target.name: target.as_row() for target in targets(ROWS, 4096)}
    trip = found["shm: round trip beside the attention, ms"]
    assert (trip["value"], trip["met"]) == (0.5, True)
    share = found["shm: 16 new tokens behind 4096: asked, of computed"]
    assert (share["value"], share["met"]) == (0.1, True)
    assert found["tcp: round trip beside the attention, ms"]["met"] is None, "not measured"


def test_the_fastest_way_of_each_prompt_is_named() -> None:
    assert notes(ROWS) == [
        "shm, 16 new behind 4096: asked",
        "shm, 64 new behind 4096: fetched",
    ]
