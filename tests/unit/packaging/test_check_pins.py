from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts import check_pins
from tests.unit.packaging.compose_file import ROOT
from tests.unit.packaging.distributions import PROJECT


def extras_within(extra: str, known: dict[str, list[str]]) -> set[str]:
    """An extra and the extras of this project that it requires."""
    required = map(Requirement, known[extra])
    inner = {name for each in required if each.name == PROJECT for name in each.extras}
    return {extra}.union(*(extras_within(each, known) for each in inner))


def test_all_extras_of_the_shared_environment_are_resolved() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = project["optional-dependencies"]
    resolved = set().union(*(extras_within(each, known) for each in check_pins.EXTRAS))
    assert resolved == set(known) - {"vllm"}


def test_the_oldest_python_that_the_project_takes_is_resolved() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={check_pins.PYTHONS[0]}"


def test_every_machine_that_cannot_be_served_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def problem(python: str, machine: str, constraints: Path) -> str:
        assert constraints == tmp_path
        return "triton is pinned twice" if (python, machine) == ("3.12", "aarch64") else ""

    monkeypatch.setattr(check_pins, "problem", problem)
    monkeypatch.setattr("sys.argv", ["check_pins", str(tmp_path)])
    assert check_pins.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(check_pins.PYTHONS) * len(check_pins.MACHINES)
    assert "Python 3.12, aarch64: triton is pinned twice" in lines


def test_pins_that_contradict_the_project_are_found(tmp_path: Path) -> None:
    wrong = tmp_path / "constraints.txt"
    wrong.write_text("grpcio==1.0\n")
    assert "grpcio==1.0" in check_pins.problem("3.11", "x86_64", wrong)
