"""The cases of the kernel benchmark, small, under the interpreter: both sides compute the same.
Run by test_triton_kernels.py.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernel_cases import SMALL, KernelCase, kernel_cases

# The interpreter's own handling of loop bounds, under the numpy that it needs.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

torch.manual_seed(0)
CASES = kernel_cases(SMALL, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {case.shape}")
def test_both_sides_compute_the_same(case: KernelCase) -> None:
    torch.testing.assert_close(case.ours(), case.twin(), rtol=1e-4, atol=1e-4)


def test_work_is_counted() -> None:
    assert all(case.num_bytes > 0 for case in CASES)
    (decode,) = (case for case in CASES if case.name == "paged decode")
    # Scores and mixed values: a multiplication and an addition each.
    assert decode.flops == 2 * (2 * 2 * 70) * 4 * 16
