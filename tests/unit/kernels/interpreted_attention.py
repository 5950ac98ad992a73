"""The Triton kernels' numbers, under the interpreter. Run by test_triton_kernels.py, because
TRITON_INTERPRET has to be set before a kernel is defined.
"""

from __future__ import annotations

import pytest
import torch

from kvmesh.kernels.dispatch import TritonAttention
from tests.unit.kernels import attention_cases as cases

# The interpreter's own handling of loop bounds, under the numpy that it needs.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

# bf16 arithmetic is wrong in the interpreter; the compile check covers that dtype.
DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", cases.DECODE_CASES, ids=str)
def test_decode(case: cases.Case, dtype: torch.dtype) -> None:
    cases.check_decode(case, dtype, "cpu")


def test_contexts_cut_by_their_own_length() -> None:
    case = cases.Case("own", ((1, 1), (70, 1), (200, 1)), kv_heads=1, num_splits=3)
    cases.check_decode(case, torch.float32, "cpu", static=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", cases.PREFILL_CASES, ids=str)
def test_prefill(case: cases.Case, dtype: torch.dtype) -> None:
    cases.check_prefill(case, dtype, "cpu")


MIXED = ((70, 1), (3, 1), (16, 5), (0, 9))


@pytest.mark.parametrize(
    ("chunks", "num_decode"), [(MIXED, 2), (MIXED[:2], 2), (MIXED[2:], 0)], ids=str
)
def test_step(chunks: tuple[tuple[int, int], ...], num_decode: int) -> None:
    case = cases.Case("mixed", chunks, kv_heads=1)
    cases.check_step(TritonAttention, case, num_decode, torch.float32, "cpu")


@pytest.mark.parametrize("case", cases.STATIC_CASES, ids=str)
def test_static_step(case: cases.Case) -> None:
    kind = cases.static_attention_by_kernel
    cases.check_step(kind, case, len(case.chunks), torch.float32, "cpu")
