"""The draw kernel on a device: the cases of the interpreter, and real vocabularies."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels import draw_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize(("rows", "vocab_size"), [(7, 50), (1, 151_936), (32, 128_256)])
def test_draws_are_those_of_the_twin(rows: int, vocab_size: int) -> None:
    draw_cases.check_draw(rows, vocab_size, "cuda")
