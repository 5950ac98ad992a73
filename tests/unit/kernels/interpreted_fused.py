"""The fused Triton kernels' numbers, under the interpreter. Run by test_triton_kernels.py."""

from __future__ import annotations

import pytest
import torch

from kvmesh.kernels import fused
from tests.unit.kernels import layer_cases

# bf16 stores truncate in the interpreter; the compile check covers that dtype.
DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_delta", [False, True])
def test_add_rms_norm(has_delta: bool, dtype: torch.dtype) -> None:
    layer_cases.check_add_rms_norm(fused.add_rms_norm, 3, has_delta, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_delta", [False, True])
def test_add_layer_norm(has_delta: bool, dtype: torch.dtype) -> None:
    layer_cases.check_add_layer_norm(fused.add_layer_norm, 3, has_delta, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    layer_cases.check_silu_and_mul(fused.silu_and_mul, 3, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("has_norm", "head_dim"), [(False, 16), (True, 24)])
def test_rope_and_write(has_norm: bool, head_dim: int, dtype: torch.dtype) -> None:
    layer_cases.check_rope_and_write(fused.rope_and_write, has_norm, head_dim, dtype, "cpu")
