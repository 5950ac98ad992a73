"""The Triton kernels without a GPU: numbers in the interpreter, compilation for sm_90.

All modules of a kind share a process: to start one costs more than most of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.kernels.apart import run_apart

INTERPRETED = {
    "interpreted_attention.py": 53,
    "interpreted_bench.py": 28,
    "interpreted_blocks.py": 16,
    "interpreted_draw.py": 7,
    "interpreted_fused.py": 14,
    "interpreted_hybrid.py": 50,
    "interpreted_large.py": 6,
}
COMPILED = {
    "compiled_attention.py": 16,
    "compiled_blocks.py": 2,
    "compiled_fused.py": 3,
    "compiled_hybrid.py": 4,
    "compiled_steps.py": 29,
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_numbers_in_the_interpreter(tmp_path: Path) -> None:
    assert run_apart(INTERPRETED, tmp_path, interpret=True) == sum(INTERPRETED.values())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_compilation_without_a_device(tmp_path: Path) -> None:
    assert run_apart(COMPILED, tmp_path, interpret=False) == sum(COMPILED.values())
