"""The reading that bounds decode: every byte counts."""

from __future__ import annotations

import functools
import operator

import pytest
import torch

from benchmarks.engine_floor import load_stream
from tests.native import needs_compiler


@needs_compiler
@pytest.mark.parametrize("way", range(4))
@pytest.mark.parametrize("threads", [1, 2])
def test_nothing_is_left_unread(way: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(way)
    memory = torch.randint(-(1 << 62), 1 << 62, (4096,), generator=generator)
    wanted = functools.reduce(operator.xor, memory.tolist())
    found = load_stream()(memory.data_ptr(), memory.nbytes, way, threads)
    assert found == wanted
