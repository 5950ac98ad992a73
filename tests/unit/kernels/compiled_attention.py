"""Launches of attention compile and fit the shared memory of their device, with no device. Run by
test_triton_kernels.py in a process of its own, without the interpreter.
"""

from __future__ import annotations

import pytest
import torch

from kvmesh.kernels.attention import paged_decode_attention
from kvmesh.kernels.prompt_attention import paged_prefill_attention
from tests.unit.kernels.no_device import device, empty

HEADS, KV_HEADS = 32, 8
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# What the steps of compiled_steps.py do not launch: other dtypes than bf16, and long heads and the
# widest dtype where there is least room.
CASES = [
    *((dtype, 128, 90) for dtype in (FP16, FP32)),
    (BF16, 256, 86),
    (FP32, 128, 86),
    (FP32, 256, 86),
]


@pytest.mark.parametrize("cap", [0.0, 50.0])
@pytest.mark.parametrize(("dtype", "head_dim", "arch"), CASES)
def test_a_prompt(dtype: torch.dtype, head_dim: int, arch: int, cap: float) -> None:
    with device(arch) as launches:
        paged_prefill_attention(
            empty(600, HEADS, head_dim, dtype=dtype),
            empty(64, 4, 2, 16, KV_HEADS, head_dim, dtype=dtype),
            3,
            empty(2, 32, dtype=torch.int32),
            empty(3, dtype=torch.int32),
            empty(2, dtype=torch.int32),
            max_query_len=500,
            scale=0.1,
            sinks=empty(HEADS, dtype=FP32),
            cap=cap,
        )
    assert [each.kernel for each in launches] == ["_prefill_kernel"]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "arch", "ids"),
    [(FP16, 128, 90, torch.int32), (FP32, 128, 90, torch.int32), (FP32, 256, 86, torch.int64)],
)
@pytest.mark.parametrize("cap", [0.0, 50.0])
def test_a_decode_step(
    dtype: torch.dtype, head_dim: int, arch: int, ids: torch.dtype, cap: float
) -> None:
    """Block tables are int64 in static steps, which cut contexts by their own lengths."""
    with device(arch) as launches:
        paged_decode_attention(
            empty(3, HEADS, head_dim, dtype=dtype),
            empty(64, 4, 2, 16, KV_HEADS, head_dim, dtype=dtype),
            3,
            empty(3, 32, dtype=ids),
            empty(3, dtype=ids),
            max_context_len=0 if ids == torch.int64 else 500,
            num_splits=2,
            scale=0.1,
            cap=cap,
        )
    assert [each.kernel for each in launches] == ["_decode_kernel", "_merge_kernel"]
