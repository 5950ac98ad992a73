"""Launches for latents and experts that the steps of compiled_steps.py do not make compile
for sm_90, with no device. Run by test_triton_kernels.py in a process of its own, without the
interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvmesh.kernels.expert_tiles import plan_tiles
from kvmesh.kernels.grouped_gemm import grouped_gemm
from kvmesh.kernels.latent_attention import latent_decode_attention
from tests.unit.kernels.no_device import device, empty


def values(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


def test_latents_in_fp32() -> None:
    """Of DeepSeek-V3; they fit large devices alone."""
    rank, rope = 512, 64
    with device(90) as launches:
        latent_decode_attention(
            values(3, 128, rank + rope),
            values(64, 4, 16, rank + rope),
            3,
            empty(3, 32, dtype=torch.int64),
            empty(3, dtype=torch.int64),
            scale=0.1,
            rank=rank,
        )
    assert [each.kernel for each in launches] == ["_latent_decode_kernel", "_merge_kernel"]


@pytest.mark.parametrize(("rows", "arch"), [(4, 86), (512, 86), (4096, 90)])
def test_experts_in_fp32(rows: int, arch: int) -> None:
    """Few rows for each, many and most: three shapes of tiles."""
    with device(arch) as launches:
        tiles = plan_tiles(empty(rows, 8, dtype=torch.int64), 128)
        x, weights = values(rows, 2048), values(128, 768, 2048)
        grouped_gemm(x, weights, tiles, top_k=8)
    planned = ["_plan_kernel"] if rows * 8 <= 4096 else []
    assert [each.kernel for each in launches] == [*planned, "_grouped_kernel"]
