"""The draw kernel without a GPU: numbers in the interpreter, compilation for sm_90."""

from __future__ import annotations

from pathlib import Path

from tests.unit.kernels.apart import run_apart


def test_numbers_in_the_interpreter(tmp_path: Path) -> None:
    assert run_apart("interpreted_draw.py", tmp_path, interpret=True) == 6


def test_compilation_for_sm_90(tmp_path: Path) -> None:
    assert run_apart("compiled_draw.py", tmp_path, interpret=False) == 1
