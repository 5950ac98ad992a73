"""The block copy kernel on a device: the cases of the interpreter, through the dispatch."""

from __future__ import annotations

import pytest
import torch

from kvmesh.kernels.block_ops import copy_pieces
from tests.unit.kernels import block_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("part", [*block_cases.PARTS, (2 << 20, 0, 2 << 20)], ids=str)
@pytest.mark.parametrize("check", block_cases.CHECKS)
def test_pieces_land(check: block_cases.Check, part: tuple[int, int, int]) -> None:
    check(copy_pieces, *part, "cuda")
