"""What the pages quote is what was measured."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.headline import with_headlines
from benchmarks.quoted_tables import DOCUMENTS, END, with_tables
from benchmarks.result import RESULTS, ROOT
from benchmarks.summary import summary

_STALE = "run make bench-summary"


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}


def test_the_page_of_results_is_up_to_date(results: dict[str, dict[str, Any]]) -> None:
    assert summary(results) == (RESULTS / "README.md").read_text(), _STALE


def test_the_readme_is_up_to_date(results: dict[str, dict[str, Any]]) -> None:
    text = (ROOT / "README.md").read_text()
    assert with_headlines(text, results) == text, _STALE


def test_tables_of_the_documents_are_up_to_date(results: dict[str, dict[str, Any]]) -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        assert END in text
        assert with_tables(text, results) == text, f"{document.name}: {_STALE}"


def test_a_page_and_its_numbers_are_of_one_run(results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        page = (RESULTS / f"{name}.md").read_text()
        assert {result["date"], result["commit"]} <= set(page.replace(",", " ").split()), name


def test_a_table_is_replaced_and_the_text_around_it_stays() -> None:
    row = {
        "experiment": "TokenLake: joint dispatch",
        "run": "5/s at once joint",
        "goodput/s": 3.091,
        "TTFT mean": 0.7273,
        "TTFT p99": 3.3125,
        "hits": 0.6068,
        "CV": 0.4212,
        "moved tokens": 1220864,
    }
    text = f"before\n<!-- measured: joint dispatch -->\nold\n{END}after\n"
    fresh = with_tables(text, {"policies": {"rows": [row, {"experiment": "another"}]}})
    assert fresh.startswith("before\n<!-- measured: joint dispatch -->\n| load | policy |")
    assert "| 5/s at once | `joint` | 3.09 | 0.727 s | 3.31 s | 60.7 % | 0.42 | 1.22 M |" in fresh
    assert fresh.endswith(f"{END}after\n")
    assert "old" not in fresh
    assert with_tables(text, {}) == text


def test_a_row_tells_of_one_event_with_each_engine() -> None:
    isolated = {"part": "isolation", "case": "policy kvmesh", "ratio": 1.014}
    rows = [
        {"engine": "fake", **isolated},
        {"engine": "fake", **isolated, "case": "policy joint", "ratio": 0.9},
        {"engine": "kvmesh", **isolated},
        {
            "engine": "kvmesh",
            "part": "ejection",
            "case": "nan",
            "ejected s": 1.2,
            "met it": 2,
            "ratio": 0.95,
        },
        {"engine": "fake", "part": "restart", "case": "gateway", "longest pause ms": 1096},
        {"engine": "fake", "part": "restart", "case": "redis master", "longest pause ms": 25},
        {"engine": "fake", "part": "restart", "case": "all", "answers": 148, "failed or wrong": 0},
    ]
    text = f"<!-- measured: fleet -->\n{END}"
    fresh = with_tables(text, {"fleet": {"rows": rows}}).splitlines()
    head, _, *events = ([cell.strip() for cell in line.split("|")[1:-1]] for line in fresh[1:-1])
    assert head == ["event under load", "fake engine", "kvmesh engine"]
    assert [told[1:] for told in events] == [
        ["p99 of this one 0.90 to 1.01 of alone", "p99 of this one 1.01 to 1.01 of alone"],
        ["148 streams, 0 failed or wrong; longest pause 1.1 s", "not run"],
        [
            "not run",
            "ejected after 1.20 s; requests that met it: 2; p99 of the others 0.95 of before",
        ],
    ]
