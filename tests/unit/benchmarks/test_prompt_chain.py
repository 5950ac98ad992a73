from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.policies_chains import LOADS
from benchmarks.prompt_chain import LENGTHS, MODELS, main, simulated, targets
from benchmarks.result import Row


def row(name: str, tokens: int, alone_ms: float, together_ms: float) -> Row:
    return {
        "model": name,
        "tokens": tokens,
        "alone_ms": {"median": alone_ms},
        "together_ms": {"median": together_ms},
    }


def test_both_lengths_of_both_models_have_a_target() -> None:
    short, long = min(LENGTHS), max(LENGTHS)
    met = targets(
        [
            row(name, *times)
            for name in MODELS
            for times in ((short, 1000, 1000), (long, 10_000, 5000))
        ]
    )
    assert [each.value for each in met] == [2.0, 1.0] * len(MODELS)
    assert all(each.met for each in met)
    missed = targets([row(MODELS[0], short, 1000, 1200), row(MODELS[0], long, 10_000, 6000)])
    assert not any(each.met for each in missed)


def test_the_simulated_workers_are_part_of_the_result() -> None:
    rows, goals = simulated(0.05, seed=1)
    assert [row["load"] for row in rows] == list(LOADS)
    assert rows[0]["times_sooner"] > 4
    assert len(goals) == 2 * len(LOADS)
    assert all(each.name.startswith("load ") for each in goals)


def test_what_is_not_measured_has_files_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = tmp_path / "prompt_chain.json"
    arguments = ["--parts", "simulated", "ways", "--size", "0.01", "--save", str(save)]
    monkeypatch.setattr(sys, "argv", ["prompt_chain", *arguments])
    main()
    assert {each.name for each in tmp_path.iterdir()} == {
        f"prompt_chain_{part}.{kind}" for part in ("simulated", "ways") for kind in ("json", "md")
    }
