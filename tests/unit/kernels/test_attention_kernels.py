"""The Triton kernels without a GPU: numbers in the interpreter, and compilation for sm_90."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.kernels.attention import num_decode_splits

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def run_apart(module: str, cache: Path, interpret: bool) -> int:
    """Runs a test module in its own process; the number of tests that passed."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(HERE / module)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    return int(passed[1])


def test_numbers_in_the_interpreter(tmp_path: Path) -> None:
    assert run_apart("interpreted_attention.py", tmp_path, interpret=True) == 21


def test_compilation_for_sm_90(tmp_path: Path) -> None:
    assert run_apart("compiled_attention.py", tmp_path, interpret=False) == 6


@pytest.mark.parametrize(
    ("num_sequences", "num_kv_heads", "max_context_len", "splits"),
    [
        (64, 8, 8192, 1),  # enough programs without
        (1, 8, 8192, 32),  # limited by the length of the parts
        (4, 8, 8192, 9),  # fills the device
        (1, 8, 100, 1),  # too short to cut
    ],
)
def test_num_decode_splits(
    num_sequences: int, num_kv_heads: int, max_context_len: int, splits: int
) -> None:
    assert num_decode_splits(num_sequences, num_kv_heads, max_context_len) == splits
