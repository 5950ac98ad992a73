from __future__ import annotations

from benchmarks.prompt_chain import LENGTHS, MODELS, targets
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
