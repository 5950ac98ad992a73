"""The README's numbers."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.gateway_systems import LOADER_ALONE
from benchmarks.headline import BEGIN, END, headlines, with_headlines
from benchmarks.result import RESULTS, ROOT

_KILLED = "1 of 3 workers killed, 24 streams"


def test_a_line_shows_the_others_of_the_same_run() -> None:
    rows: list[dict[str, Any]] = [
        {"system": "kvmesh", "what": _KILLED, "failed": 0},
        {"system": "kvmesh, prefixes looked up", "what": _KILLED, "failed": 1},
        {"system": "other", "what": _KILLED, "failed": 8},
        {"system": LOADER_ALONE, "what": _KILLED, "failed": 0},
    ]
    lines = headlines({"gateway": {"rows": rows}}).splitlines()
    [line] = [line for line in lines if "killed" in line]
    assert line.endswith("| 0 | other 8 | [gateway](bench/results/gateway.md) |")


def test_what_was_not_measured_is_left_out() -> None:
    assert headlines({}) == "\n"
    unmeasured = [{"name": "every cell: times transformers", "value": None}]
    assert "transformers" not in headlines({"engine": {"targets": unmeasured}})


def test_the_text_around_the_markers_stays() -> None:
    text = f"before\n{BEGIN}old\n{END}\nafter\n"
    fresh = with_headlines(text, {})
    assert fresh.startswith(f"before\n{BEGIN}")
    assert fresh.endswith(f"{END}\nafter\n")
    assert "old" not in fresh


def test_the_results_of_the_repository_fill_every_line() -> None:
    results = {file.stem: json.loads(file.read_text()) for file in RESULTS.glob("*.json")}
    assert len(headlines(results).splitlines()) == 2 + 14
    readme = (ROOT / "README.md").read_text()
    assert with_headlines(readme, results).startswith("# KVMesh")
