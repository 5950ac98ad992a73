"""The Triton kernels on a device: the cases of the interpreter, in all dtypes and real sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvmesh.kernels.dispatch import TritonAttention
from tests.unit.kernels import attention_cases as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DTYPES = list(cases.TOLERANCE)
LARGE: dict[str, Any] = {"kv_heads": 8, "group": 4, "head_dim": 128}
DECODE_CASES = (
    *cases.DECODE_CASES,
    cases.Case("usual heads", ((700, 1), (31, 1), (1029, 1)), **LARGE, num_splits=4),
)
PREFILL_CASES = (
    *cases.PREFILL_CASES,
    cases.Case("usual heads", ((0, 130), (300, 65), (17, 2)), **LARGE),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
def test_decode(case: cases.Case, dtype: torch.dtype) -> None:
    cases.check_decode(case, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_prefill(case: cases.Case, dtype: torch.dtype) -> None:
    cases.check_prefill(case, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step(dtype: torch.dtype) -> None:
    chunks = ((700, 1), (690, 1), (3, 1), (16, 5), (0, 90))
    cases.check_step(TritonAttention, cases.Case("mixed", chunks), 3, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", cases.STATIC_CASES, ids=str)
def test_static_step(case: cases.Case, dtype: torch.dtype) -> None:
    cases.check_step(cases.static_attention, case, len(case.chunks), dtype, "cuda")
