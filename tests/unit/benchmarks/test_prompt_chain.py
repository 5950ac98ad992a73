from __future__ import annotations

from benchmarks.policies_chains import LOADS
from benchmarks.prompt_chain import LENGTHS, MODELS, simulated, targets
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
    assert all(each.name.startswith("simulated, load ") for each in goals)
