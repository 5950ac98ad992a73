"""One machine used in three ways: what is said of the rounds."""

from __future__ import annotations

import json

from benchmarks.one_box import AUTO, MIXED, median_row, row_of, targets_of
from benchmarks.our_mesh import CHECKPOINT
from benchmarks.random_llama import SERVED_SHAPE
from benchmarks.result import Row


def _row(system: str, ttft_ms: float, good: float = 1.0, failed: int = 0) -> Row:
    report = {
        "p50_ttft_ms": ttft_ms,
        "p99_ttft_ms": 2 * ttft_ms,
        "p50_tpot_ms": 10.0,
        "p99_itl_ms": 50.0,
        "request_goodput": 0.4 * good,
        "request_throughput": 0.4,
        "failed": failed,
    }
    return row_of(system, 0.4, report)


def test_a_row_is_the_median_of_its_rounds_and_the_worst_of_failures() -> None:
    row = median_row([_row(AUTO, 100), _row(AUTO, 300, failed=2), _row(AUTO, 200, 0.5)])
    assert (row["TTFT p50 ms"], row["good"], row["failed"]) == (200, 1.0, 2)


def test_targets_are_missed_by_more_than_a_twentieth() -> None:
    slow = targets_of([_row(MIXED, 100), _row(AUTO, 106, good=0.9)])
    assert [target.met for target in slow] == [False, True, False]
    near = targets_of([_row(MIXED, 100), _row(AUTO, 104, good=0.96)])
    assert all(target.met for target in near)


def test_every_token_of_the_model_has_a_text() -> None:
    tokenizer = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    assert len(tokenizer["model"]["vocab"]) == SERVED_SHAPE.vocab
