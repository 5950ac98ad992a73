"""What came of trying clients: results from their output, a file that keeps them, tables.

Tests: tests/unit/packaging/test_client_report.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.clients.cases import MARK
from scripts.try_clients.programs import PROGRAMS, Program

BEGIN, END = "<!-- clients -->", "<!-- end of clients -->"
"""What the table in docs/compatibility.md stands between."""

_HEAD = ("| program | version | what was run | result |", "|---|---|---|---|")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One thing that a program tried.

    Attributes:
        problem: empty if it worked.
        note: numbers that it told.
    """

    name: str
    problem: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """What came of one program.

    Attributes:
        version: empty if it is not installed.
        problem: what kept it from ending well, beyond its cases.
    """

    program: Program
    version: str
    cases: tuple[CaseResult, ...] = ()
    problem: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether it could be tried."""
        return bool(self.version)

    @property
    def has_failed(self) -> bool:
        """Whether it ran, and something did not work."""
        return self.is_installed and bool(self.problem or any(each.problem for each in self.cases))


def parse_cases(output: Iterable[str]) -> tuple[CaseResult, ...]:
    """The cases among all that a program wrote."""
    lines = (line.removeprefix(MARK) for line in output if line.startswith(MARK))
    told = (json.loads(line) for line in lines)
    return tuple(CaseResult(each["name"], each["problem"], each.get("note", "")) for each in told)


def keep(results: Sequence[ProgramResult], folder: Path) -> None:
    """Adds results to those of earlier runs, or replaces them."""
    kept = {each.program.name: each for each in (*kept_results(folder), *results)}
    told = [asdict(each) for each in kept.values()]
    (folder / "results.json").write_text(json.dumps(told, indent=2))


def kept_results(folder: Path) -> list[ProgramResult]:
    """The last result of each program, in the order of the table."""
    path = folder / "results.json"
    told = json.loads(path.read_text()) if path.exists() else []
    by_name = {each["program"]["name"]: each for each in told}
    return [_result(PROGRAMS[name], by_name[name]) for name in PROGRAMS if name in by_name]


def _result(program: Program, told: Mapping[str, Any]) -> ProgramResult:
    cases = tuple(CaseResult(**each) for each in told["cases"])
    return ProgramResult(program, told["version"], cases, told["problem"])


def verdict(result: ProgramResult) -> str:
    """The result in a few words: the last column."""
    if not result.is_installed:
        return f"not tried, it does not install here: {result.problem}"
    failed = [case for case in result.cases if case.problem]
    worked = len(result.cases) - len(failed)
    said = "works" if not failed else f"{worked} of {len(result.cases)} work"
    problems = [f"{case.name}: {case.problem}" for case in failed]
    return "; ".join([said, *problems, *([result.problem] if result.problem else [])])


def row(result: ProgramResult, *, has_notes: bool = False) -> str:
    """A line of the table.

    Args:
        has_notes: with the numbers that the program told; they are those of one run.
    """
    cases = (
        f"{each.name} ({each.note})" if has_notes and each.note else each.name
        for each in result.cases
    )
    remark = f" ({result.program.remark})" if result.program.remark else ""
    cells = (f"`{result.program.name}`{remark}", result.version, ", ".join(cases), verdict(result))
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def table(results: Sequence[ProgramResult], *, has_notes: bool = False) -> str:
    """The whole table, in Markdown; notes as in `row`."""
    return "\n".join([*_HEAD, *(row(result, has_notes=has_notes) for result in results)])


def with_table(page: str, text: str) -> str:
    """The page with another table between its marks.

    Raises:
        ValueError: a mark is missing.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} ... {END}")
    return f"{before}{begin}\n{text}\n{end}{after}"
