"""The draw kernel against its twin, under the interpreter. Run by test_triton_kernels.py."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels import draw_cases

# The interpreter's own handling of loop bounds, under the numpy that it needs.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


# One lane short of a tile, whole tiles, several parts with a ragged last one.
@pytest.mark.parametrize("vocab_size", [50, 2047, 4096, 9000])
def test_draws_are_those_of_the_twin(vocab_size: int) -> None:
    draw_cases.check_draw(7, vocab_size, "cpu")


def test_equal_logits_give_the_lowest_token() -> None:
    logits = torch.zeros(2, 5000)
    logits[0, [4, 2050, 4999]] = 3.0
    logits[1, [4097, 4999]] = 3.0
    assert draw_cases.run_kernel(logits, {}).tolist() == [4, 4097]


def test_filtered_tokens_are_never_drawn() -> None:
    logits = torch.full((40, 3000), -torch.inf)
    logits[:, [17, 2900]] = 0.0
    drawn = draw_cases.run_kernel(logits, {row: row * 977 for row in range(40)})
    assert set(drawn.tolist()) == {17, 2900}


def test_rows_in_which_nothing_can_be_chosen_give_a_token_of_the_vocabulary() -> None:
    logits = torch.full((3, 3000), -torch.inf)
    logits[1] = torch.nan
    logits[2, 2900] = 0.0
    assert draw_cases.run_kernel(logits, {0: 5}).tolist() == [0, 0, 2900]
