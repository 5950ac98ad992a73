from __future__ import annotations

from pathlib import Path

import pytest

from scripts.clients.cases import Target, run_cases
from scripts.try_clients.programs import PROGRAMS
from scripts.try_clients.report import (
    BEGIN,
    END,
    CaseResult,
    ProgramResult,
    keep,
    kept_results,
    parse_cases,
    table,
    verdict,
    with_table,
)

OPENAI = PROGRAMS["openai"]


def test_cases_are_told_and_read_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def that_works(target: Target) -> str:
        print("other output")
        return f"of {target.model}"

    async def that_fails(target: Target) -> None:
        raise LookupError(target.folder)

    monkeypatch.setattr("sys.argv", ["program", "http://h/v1", "m", "folder"])
    run_cases([that_works, that_fails])
    assert parse_cases(capsys.readouterr().out.splitlines()) == (
        CaseResult("that works", "", "of m"),
        CaseResult("that fails", "LookupError: folder"),
    )


def test_a_verdict_counts_and_names_what_failed() -> None:
    fine, wrong = CaseResult("chat", ""), CaseResult("tools", "KeyError: x")
    assert verdict(ProgramResult(OPENAI, "1", (fine,))) == "works"
    assert verdict(ProgramResult(OPENAI, "1", (fine, wrong))) == "1 of 2 work; tools: KeyError: x"
    assert verdict(ProgramResult(OPENAI, "1", (fine,), "left")) == "works; left"
    assert verdict(ProgramResult(OPENAI, "", problem="no")).startswith("not tried")


def test_what_does_not_install_is_no_failure() -> None:
    assert not ProgramResult(OPENAI, "", problem="no").has_failed
    assert ProgramResult(OPENAI, "1", problem="left").has_failed
    assert ProgramResult(OPENAI, "1", (CaseResult("chat", "wrong"),)).has_failed


def test_the_table_replaces_the_one_in_the_page() -> None:
    results = [ProgramResult(OPENAI, "3", (CaseResult("chat", "", "5 ms"),))]
    told = table(results, has_notes=True)
    assert told.splitlines()[-1] == "| `openai` | 3 | chat (5 ms) | works |"
    text = table(results)
    assert text.splitlines()[-1] == "| `openai` | 3 | chat | works |"
    page = with_table(f"a\n{BEGIN}\nold\n{END}\nb\n", text)
    assert page == f"a\n{BEGIN}\n{text}\n{END}\nb\n"
    assert with_table(page, "new") == f"a\n{BEGIN}\nnew\n{END}\nb\n"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="clients"):
        with_table("nothing", "table")


def test_results_are_kept_until_there_are_newer_ones(tmp_path: Path) -> None:
    old = ProgramResult(PROGRAMS["llm"], "1", (CaseResult("chat", "no", "5 ms"),), "left")
    other = ProgramResult(PROGRAMS["openai"], "2")
    keep([old, other], tmp_path)
    assert kept_results(tmp_path) == [other, old]
    newer = ProgramResult(PROGRAMS["llm"], "3")
    keep([newer], tmp_path)
    assert kept_results(tmp_path) == [other, newer]
