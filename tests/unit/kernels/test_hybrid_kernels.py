"""Triton kernels of latents, states and experts without a GPU: numbers in the interpreter,
compilation for sm_90.
"""

from __future__ import annotations

from pathlib import Path

from tests.unit.kernels.apart import run_apart


def test_numbers_in_the_interpreter(tmp_path: Path) -> None:
    assert run_apart("interpreted_hybrid.py", tmp_path, interpret=True) == 25


def test_compilation_for_sm_90(tmp_path: Path) -> None:
    assert run_apart("compiled_hybrid.py", tmp_path, interpret=False) == 11
