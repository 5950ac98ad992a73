"""The kernel benchmark's targets from rows; its cases run in interpreted_bench.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import kernels
from benchmarks.kernel_case import KernelCase
from benchmarks.kernels import take_case, take_slow_rivals, targets


def row(kernel: str, shape: str, ms: float, **others: Any) -> dict[str, Any]:
    found = {"kernel": kernel, "shape": shape, "ms": ms, "twin ms": 2.0, "SDPA ms": None}
    return found | {"difference": 1e-3} | others


def test_targets() -> None:
    rows = [
        row("paged decode", "batch 32, context 8192", 1.0, **{"share of ceiling": 0.9}),
        row("paged prefill", "1 chunks of 4096, 0 cached", 1.0, **{"SDPA ms": 0.5}),
        row("sampling", "32 x 100", 4.0, difference=0.5),
    ]
    found = {target.name: target.met for target in targets(rows)}
    assert found == {
        "paged decode, batch 32, context 8192, of copy": True,
        "paged prefill, 1 chunks of 4096, 0 cached, x best SDPA": False,
        "paged decode, batch 32, context 8192, x twin": True,
        "paged prefill, 1 chunks of 4096, 0 cached, x twin": True,
        "sampling, 32 x 100, x twin": False,
        "paged decode, batch 32, context 8192, difference": True,
        "paged prefill, 1 chunks of 4096, 0 cached, difference": True,
        "sampling, 32 x 100, difference": False,
    }
    assert [target.met for target in targets([])] == [None]


def test_a_kernel_that_failed_misses_its_target_and_no_other() -> None:
    failed = {"kernel": "sampling", "shape": "32 x 100", "failed": "out of memory"}
    found = {target.name: target.met for target in targets([failed, row("copy", "1", 1.0)])}
    assert found["sampling, 32 x 100, x twin"] is None
    assert found["sampling, 32 x 100, difference"] is None
    assert found["copy, 1, x twin"] is True


def test_every_case_gets_one_row_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(case: KernelCase, _ceilings: dict[str, float]) -> dict[str, Any]:
        if case.shape == "bad":
            raise ValueError("no such thing\nand more")
        return row(case.name, case.shape, 1.0, **{"slow rivals": None})

    monkeypatch.setattr(kernels, "_measure", measured)
    rows: list[dict[str, Any]] = []
    makers = [_no_inputs, *(_case(shape) for shape in ("good", "bad", "last"))]
    for _ in range(2):  # the second time as one that resumes
        for take in (take_case, take_slow_rivals):
            for number, make in enumerate(makers, 1):
                take(number, make, rows, {})
    assert [(each["kernel"], each["shape"], each.get("failed")) for each in rows] == [
        ("case 1", "its inputs", "out of memory"),
        ("sampling", "good", None),
        ("sampling", "bad", "no such thing"),
        ("sampling", "last", None),
    ]


def _no_inputs() -> KernelCase:
    raise RuntimeError("out of memory")


def _case(shape: str) -> Callable[[], KernelCase]:
    return lambda: KernelCase("sampling", shape, torch.zeros, torch.zeros, 1)
