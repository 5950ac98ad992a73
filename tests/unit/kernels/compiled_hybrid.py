"""Launches for latents, states and experts compile for sm_90, with no device. Run by
test_triton_kernels.py in a process of its own, without the interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvmesh.kernels.delta_rule import delta_scan, delta_step
from kvmesh.kernels.grouped_gemm import grouped_gemm, plan_tiles
from kvmesh.kernels.latent_attention import latent_decode_attention
from kvmesh.kernels.lightning import lightning_scan, lightning_step
from tests.unit.kernels.no_device import device, empty

HEADS, DIM = 32, 128


def values(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_latents(dtype: torch.dtype) -> None:
    """Of DeepSeek-V3; in fp32 they fit large devices alone."""
    rank, rope = 512, 64
    with device(90) as launches:
        latent_decode_attention(
            empty(3, 128, rank + rope, dtype=dtype),
            empty(64, 4, 16, rank + rope, dtype=dtype),
            3,
            empty(3, 32, dtype=torch.int64),
            empty(3, dtype=torch.int64),
            scale=0.1,
            rank=rank,
        )
    assert len(launches) == 1


@pytest.mark.parametrize("channels", [1, DIM])
def test_the_delta_rule(channels: int) -> None:
    with device(90) as launches:
        q, k, v, decay = (values(20, HEADS, width) for width in (DIM, DIM, DIM, channels))
        delta_step(q, k, v, decay, values(20, HEADS), values(20, HEADS, DIM, DIM))
        delta_scan(q, k, v, decay, values(20, HEADS), values(HEADS, DIM, DIM))
    assert len(launches) == 2


def test_lightning_attention() -> None:
    with device(90) as launches:
        q, k, v = (values(20, HEADS, DIM) for _ in range(3))
        lightning_step(q, k, v, values(HEADS), values(20, HEADS, DIM, DIM))
        lightning_scan(q, k, v, values(HEADS), values(HEADS, DIM, DIM))
    assert len(launches) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [4, 4096])
def test_experts(rows: int, dtype: torch.dtype) -> None:
    """Few rows for each, and many: two shapes of tiles."""
    with device(90) as launches:
        tiles = plan_tiles(empty(rows, 8, dtype=torch.int64), 128)
        x, weights = empty(rows, 2048, dtype=dtype), empty(128, 768, 2048, dtype=dtype)
        grouped_gemm(x, weights, tiles.order // 8, tiles)
    assert len(launches) == 1
