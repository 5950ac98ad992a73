"""Pools of more than 2^31 elements, most of them a hole in a file: kernels find blocks at the far
end. Run by test_triton_kernels.py in a process of its own, with the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvmesh.kernels.attention import paged_decode_attention
from kvmesh.kernels.block_copy import copy_pieces
from kvmesh.kernels.expert_tiles import plan_tiles
from kvmesh.kernels.fused import rope_and_write
from kvmesh.kernels.grouped_gemm import grouped_gemm
from kvmesh.kernels.latent_attention import latent_decode_attention
from kvmesh.kernels.prompt_attention import paged_prefill_attention

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

SIZE, DIM = 16, 16
NEAR = (2, 0)
"""Blocks of the context in a small pool, which are the last ones of a large pool."""


def pools(folder: Path, *block: int) -> tuple[Tensor, Tensor, int]:
    """A pool of three random blocks, one that ends with them, and the first of them there."""
    generator = torch.Generator().manual_seed(1)
    near = torch.randn(3, *block, generator=generator).half()
    first = (1 << 31) // near[0].numel() + 1
    count = (first + 3) * near[0].numel()
    flat = torch.from_file(str(folder / "pool"), shared=True, size=count, dtype=torch.float16)
    far = flat.view(-1, *block)
    far[first:] = near
    return near, far, first


def decoded(kv: Tensor, tables: Tensor) -> Tensor:
    q = torch.ones(1, 2, DIM, dtype=torch.float16)
    lens = torch.tensor([21], dtype=torch.int32)
    return paged_decode_attention(
        q, kv, 0, tables, lens, max_context_len=21, num_splits=1, scale=0.2
    )


def prefilled(kv: Tensor, tables: Tensor) -> Tensor:
    q = torch.ones(3, 2, DIM, dtype=torch.float16)
    starts, lens = torch.tensor([0, 3]).int(), torch.tensor([21]).int()
    return paged_prefill_attention(q, kv, 0, tables, starts, lens, max_query_len=3, scale=0.2)


@pytest.mark.parametrize("attend", [decoded, prefilled])
def test_attention(attend: Callable[[Tensor, Tensor], Tensor], tmp_path: Path) -> None:
    near, far, first = pools(tmp_path, 1, 2, SIZE, 1, DIM)
    tables = torch.tensor([NEAR], dtype=torch.int32)
    assert torch.equal(attend(far, tables + first), attend(near, tables))


def test_latents(tmp_path: Path) -> None:
    near, far, first = pools(tmp_path, 1, SIZE, DIM + 8)
    tables, lens = torch.tensor([NEAR]), torch.tensor([21])
    q = torch.ones(1, 2, DIM + 8, dtype=torch.float16)
    found = [
        latent_decode_attention(q, kv, 0, ids, lens, scale=0.2, rank=DIM)
        for kv, ids in ((near, tables), (far, tables + first))
    ]
    assert torch.equal(*found)


def test_keys_and_values_are_written(tmp_path: Path) -> None:
    near, far, first = pools(tmp_path, 1, 2, SIZE, 1, DIM)
    ones = torch.ones(1, 1, DIM, dtype=torch.float16)
    qkv = torch.ones(1, 3, DIM, dtype=torch.float16)
    slots = torch.tensor([2 * SIZE + 5])
    for kv, moved in ((near, 0), (far, first * SIZE)):
        rope_and_write(qkv.clone(), None, 0.0, ones, ones, kv, 0, slots + moved)
    assert near[2, 0, 1, 5].eq(1).all()
    assert torch.equal(far[first:], near)


def test_blocks_are_copied(tmp_path: Path) -> None:
    near, far, first = pools(tmp_path, SIZE * DIM)
    size = near[0].nbytes
    out = torch.zeros(2 * size, dtype=torch.uint8)
    source = far.view(torch.uint8).view(-1)
    copy_pieces(out, source, torch.tensor([[0, (first + 2) * size], [size, first * size]]), size)
    assert torch.equal(out.view(torch.float16).view(2, -1), near[[2, 0]])
    copy_pieces(source, out, torch.tensor([[(first + 1) * size, 0]]), size)
    assert torch.equal(far[first + 1], near[2])


def test_experts(tmp_path: Path) -> None:
    near, far, first = pools(tmp_path, 16, DIM)
    x = torch.randn(5, DIM, generator=torch.Generator().manual_seed(2)).half()
    found = []
    for weights, moved in ((near, 0), (far, first)):
        chosen = torch.tensor([2, 0, 2, 1, 0])[:, None]
        tiles = plan_tiles(chosen, 3)
        # Only the last experts of the large ones have rows.
        tiles = replace(tiles, expert=torch.where(tiles.first < tiles.end, tiles.expert + moved, 0))
        found.append(grouped_gemm(x, weights, tiles))
    assert torch.equal(*found)
    assert found[0].abs().amin() > 0
