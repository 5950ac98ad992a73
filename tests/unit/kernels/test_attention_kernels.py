"""The Triton kernels without a GPU: numbers in the interpreter, and compilation for sm_90."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.kernels.attention import num_decode_splits
from tests.unit.kernels.apart import run_apart


def test_numbers_in_the_interpreter(tmp_path: Path) -> None:
    assert run_apart("interpreted_attention.py", tmp_path, interpret=True) == 31


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
