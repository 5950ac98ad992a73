"""The kernel benchmark's targets from rows; its cases run in interpreted_bench.py."""

from __future__ import annotations

from typing import Any

from benchmarks.kernels import targets


def row(kernel: str, shape: str, ms: float, **others: Any) -> dict[str, Any]:
    return {"kernel": kernel, "shape": shape, "ms": ms, "twin ms": 2.0, "SDPA ms": None} | others


def test_targets() -> None:
    rows = [
        row("paged decode", "batch 32, context 8192", 1.0, **{"share of ceiling": 0.9}),
        row("paged prefill", "1 chunks of 4096, 0 cached", 1.0, **{"SDPA ms": 0.5}),
        row("sampling", "32 x 100", 4.0),
    ]
    found = {target.name: target.met for target in targets(rows)}
    assert found == {
        "paged decode, batch 32, context 8192, of copy": True,
        "paged prefill, 1 chunks of 4096, 0 cached, x best SDPA": False,
        "paged decode, batch 32, context 8192, x twin": True,
        "paged prefill, 1 chunks of 4096, 0 cached, x twin": True,
        "sampling, 32 x 100, x twin": False,
    }
    assert [target.met for target in targets([])] == [None]


def test_a_kernel_that_failed_misses_its_target_and_no_other() -> None:
    failed = {"kernel": "sampling", "shape": "32 x 100", "failed": "out of memory"}
    found = {target.name: target.met for target in targets([failed, row("copy", "1", 1.0)])}
    assert found["sampling, 32 x 100, x twin"] is None
    assert found["copy, 1, x twin"] is True
