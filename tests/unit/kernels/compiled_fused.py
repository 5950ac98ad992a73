"""Launches between matrix products compile for sm_90 in other dtypes than bf16, and so does the
draw, with no device. Run by test_triton_kernels.py in a process of its own, without the
interpreter.
"""

from __future__ import annotations

import pytest
import torch

from kvmesh.kernels import layer_ops
from kvmesh.kernels.draw import draw
from tests.unit.kernels.no_device import device, empty


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_steps_of_a_layer_compile(dtype: torch.dtype) -> None:
    with device(90) as launches:
        x, angles = empty(5, 4096, dtype=dtype), empty(5, 1, 128, dtype=dtype)
        for delta in (None, x):
            weight = empty(4096, dtype=dtype)
            layer_ops.add_rms_norm(x, delta, weight, 1e-6)
            layer_ops.add_layer_norm(x, delta, weight, weight, 1e-6)
        layer_ops.silu_and_mul(empty(5, 2 * 14_336, dtype=dtype))
        for qk_norm in (None, empty(40, 128, dtype=dtype)):
            layer_ops.rope_and_write(
                empty(5, 48, 128, dtype=dtype),
                qk_norm,
                1e-6,
                angles,
                angles,
                empty(9, 4, 2, 16, 8, 128, dtype=dtype),
                3,
                empty(5, dtype=torch.int64),
            )
    assert len(launches) == 7


def test_the_draw_compiles() -> None:
    with device(90) as launches:
        keys = empty(3, 2, dtype=torch.int32)
        draw(empty(3, 128_256, dtype=torch.float32), keys[:, 0], keys[:, 1], keys[:, 0])
    assert len(launches) == 1
