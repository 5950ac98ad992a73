"""The torch twin of block copies, and which one a tensor gets."""

from __future__ import annotations

import pytest

from kvmesh.kernels.block_ops import copy_pieces
from tests.unit.kernels import block_cases


@pytest.mark.parametrize("part", block_cases.PARTS, ids=str)
@pytest.mark.parametrize("check", block_cases.CHECKS[:2])
def test_pieces_land(check: block_cases.Check, part: tuple[int, int, int]) -> None:
    check(copy_pieces, *part, "cpu")
