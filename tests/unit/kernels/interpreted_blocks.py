"""The block copy kernel's bytes, under the interpreter. Run by test_triton_kernels.py."""

from __future__ import annotations

import pytest
import torch

from kvmesh.kernels.block_copy import copy_pieces
from tests.unit.kernels import block_cases


@pytest.mark.parametrize("part", block_cases.PARTS, ids=str)
@pytest.mark.parametrize("check", block_cases.CHECKS)
def test_pieces_land(check: block_cases.Check, part: tuple[int, int, int]) -> None:
    check(copy_pieces, *part, "cpu")


def test_no_piece_changes_nothing() -> None:
    target = torch.zeros(64, dtype=torch.uint8)
    copy_pieces(target, torch.ones_like(target), torch.empty((0, 2), dtype=torch.int64), 16)
    assert not target.any()
