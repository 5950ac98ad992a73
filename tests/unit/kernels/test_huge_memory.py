from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from kvmesh.kernels import huge_memory
from kvmesh.kernels.huge_memory import PIECE_BYTES, gather
from kvmesh.kernels.linear import make_linear

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes() -> int:
    found = re.search(r"AnonHugePages:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text())
    return 0 if found is None else int(found[1]) << 10


def can_gather() -> bool:
    """Whether the system gathers at all: asked with memory of whole pieces."""
    memory = torch.ones(3 * PIECE_BYTES, dtype=torch.uint8)
    return gather(memory.data_ptr(), memory.numel()) > 0


needs_pieces = pytest.mark.skipif(
    not ENABLED.is_file() or not can_gather(), reason="the system gathers no memory"
)


@needs_pieces
def test_memory_is_gathered_and_stays_what_it_was() -> None:
    memory = torch.arange(2 * PIECE_BYTES, dtype=torch.int32)
    before, address = huge_bytes(), memory.data_ptr()
    pieces = gather(address, memory.numel() * 4)
    assert pieces >= 7, "all pieces but those at the ends lie within the range"
    assert huge_bytes() >= before + PIECE_BYTES, "some may have been so before"
    assert memory.data_ptr() == address
    assert torch.equal(memory, torch.arange(2 * PIECE_BYTES, dtype=torch.int32))


def test_small_memory_and_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.ones(3 * PIECE_BYTES, dtype=torch.uint8)
    assert gather(memory.data_ptr(), PIECE_BYTES - 1) == 0
    monkeypatch.setattr(sys, "platform", "darwin")
    huge_memory._madvise.cache_clear()
    try:
        assert gather(memory.data_ptr(), memory.numel()) == 0
    finally:
        huge_memory._madvise.cache_clear()


def test_what_is_not_memory_is_refused_quietly() -> None:
    assert gather(0, PIECE_BYTES) == 0


@needs_pieces
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_weight_is_gathered_and_multiplies_as_before(dtype: torch.dtype) -> None:
    weight, x = torch.randn(2048, 1024).to(dtype), torch.randn(2, 1024).to(dtype)
    before = huge_bytes()
    product = make_linear(weight)
    if not product.packed:
        pytest.skip("this build packs nothing")
    assert huge_bytes() > before
    expected = x.float() @ weight.float().T
    torch.testing.assert_close(product(x).float(), expected, atol=0.5, rtol=2e-2)
