"""A result that is measured in parts has all of their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.result import interval, joined, save


def part(command: str, commit: str, *rows: tuple[str, int]) -> dict[str, Any]:
    return {
        "command": command,
        "date": "today",
        "commit": commit,
        "machine": {"processor": "p", "cores": 2, "system": "s"},
        "rows": [{"kind": kind, "value": value} for kind, value in rows],
        "targets": [],
        "notes": [],
    }


def test_rows_of_other_parts_stay(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    first = part("first", "abc", ("a", 1), ("b", 2))
    assert joined(first, path, "kind") == first, "there is no file yet"
    save(first, path)
    both = joined(part("second", "abc", ("b", 3), ("c", 4)), path, "kind")
    assert [tuple(row.values()) for row in both["rows"]] == [("a", 1), ("b", 3), ("c", 4)]
    assert both["command"] == "first && second"


def test_rows_that_were_measured_again_or_with_other_code_go(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    save(part("first", "abc", ("a", 1)), path)
    for again in (part("second", "abc", ("a", 2)), part("second", "def", ("b", 3))):
        assert joined(again, path, "kind") == again


def test_the_interval_is_students() -> None:
    assert interval([1.0]) == 0.0
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(4.30 / 3**0.5, rel=1e-3)
    # Of 13 degrees of freedom no t is known: that of 12 is a little wider.
    assert interval([0.0, 2.0] * 7) == pytest.approx(2.18 / 13**0.5, rel=1e-3)
