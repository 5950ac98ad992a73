from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kvmesh.kernels import huge_memory
from kvmesh.kernels.huge_memory import PIECE_BYTES, gather
from kvmesh.kernels.linear import make_linear

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


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
    address = memory.data_ptr()
    # How many there are depends on what the system has in one piece at this moment, perhaps none.
    # The first and the last one are shared with neighbours.
    assert 0 <= gather(address, memory.numel() * 4) <= memory.numel() * 4 // PIECE_BYTES + 1
    assert memory.data_ptr() == address
    assert torch.equal(memory, torch.arange(2 * PIECE_BYTES, dtype=torch.int32))


def test_small_memory_and_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.ones(3 * PIECE_BYTES, dtype=torch.uint8)
    assert gather(memory.data_ptr(), PIECE_BYTES - 1) == 0
    monkeypatch.setattr(sys, "platform", "darwin")
    assert gather(memory.data_ptr(), memory.numel()) == 0


def test_what_is_not_memory_is_refused_quietly() -> None:
    assert gather(0, PIECE_BYTES) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_weight_is_gathered_and_multiplies_as_before(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def watched(address: int, num_bytes: int) -> int:
        asked.append(num_bytes)
        return gather(address, num_bytes)

    monkeypatch.setattr(huge_memory, "gather", watched)
    weight, x = torch.randn(2048, 1024).to(dtype), torch.randn(2, 1024).to(dtype)
    product = make_linear(weight)
    if not product.packed:
        pytest.skip("this build packs nothing")
    assert asked == [weight.numel() * weight.element_size()]
    expected = x.float() @ weight.float().T
    torch.testing.assert_close(product(x).float(), expected, atol=0.5, rtol=2e-2)
