"""A result that is measured in parts has all of their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.result import joined, save


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
