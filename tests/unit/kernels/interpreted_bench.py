"""The cases of the kernel benchmark, small, under the interpreter: both sides compute the same.
Run by test_triton_kernels.py.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernel_case import SMALL, KernelCase
from benchmarks.kernel_cases import case_makers
from benchmarks.kernel_rivals import SDPA, is_same, largest_difference, rivals

# The interpreter's own handling of loop bounds, under the numpy that it needs.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

torch.manual_seed(0)
CASES = [make() for make in case_makers(SMALL, torch.float32, torch.device("cpu"))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {case.shape}")
def test_both_sides_compute_the_same(case: KernelCase) -> None:
    ours, twin = case.ours(), case.twin()
    torch.testing.assert_close(ours, twin, rtol=1e-4, atol=1e-4)
    assert largest_difference(ours, twin) < 1e-3


def test_work_is_counted() -> None:
    assert all(case.num_bytes > 0 for case in CASES)
    (decode,) = (case for case in CASES if case.name == "paged decode")
    # Scores and mixed values: a multiplication and an addition each.
    assert decode.flops == 2 * (2 * 2 * 80) * 4 * 16


@pytest.mark.parametrize(
    "case", [each for each in CASES if each.tensors], ids=lambda case: case.shape
)
def test_a_rival_computes_the_same(case: KernelCase) -> None:
    """The one that runs on a host too; FlashInfer is not installed and says so."""
    compute = dict(rivals(case, slow=False))[f"{SDPA} flash_attention"]()
    assert is_same(case.ours(), compute())
    assert not is_same(case.ours() + 0.1, compute())
    with pytest.raises(ImportError):
        dict(rivals(case, slow=True))["FlashInfer"]()
