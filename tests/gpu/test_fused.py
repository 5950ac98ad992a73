"""The fused Triton kernels on a device: the cases of the interpreter, in all dtypes."""

from __future__ import annotations

import pytest
import torch

from kvmesh.kernels import layer_ops
from tests.unit.kernels import layer_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DTYPES = list(layer_cases.TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(dtype: torch.dtype) -> None:
    layer_cases.check_add_rms_norm(layer_ops.add_rms_norm, 70, True, dtype, "cuda")
    layer_cases.check_add_layer_norm(layer_ops.add_layer_norm, 70, True, dtype, "cuda")
    layer_cases.check_silu_and_mul(layer_ops.silu_and_mul, 70, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_and_write(has_norm: bool, dtype: torch.dtype) -> None:
    layer_cases.check_rope_and_write(layer_ops.rope_and_write, has_norm, 128, dtype, "cuda")
