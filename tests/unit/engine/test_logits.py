from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvmesh.core.errors import StructureError
from kvmesh.core.types import SamplingParams
from kvmesh.engine.logits import shape_row
from kvmesh.engine.protocol import SequenceChunk, TokenConstraint
from kvmesh.engine.sampler import sample

EOS = 0
VOCAB_SIZE = 6


class Only:
    """Allows the same tokens always and remembers what it was asked after."""

    ready = True

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = token_ids
        self.asked: list[list[int]] = []

    def allowed(self, generated: Sequence[int]) -> NDArray[np.bool_]:
        self.asked.append(list(generated))
        mask = np.zeros(VOCAB_SIZE, dtype=np.bool_)
        mask[list(self.token_ids)] = True
        return mask


class Broken:
    ready = True

    def allowed(self, generated: Sequence[int]) -> NDArray[np.bool_]:
        raise StructureError("cannot go on")


def chunk(
    tokens: Sequence[int] = (1, 2),
    num_prompt_tokens: int = 1,
    constraint: TokenConstraint | None = None,
    **params: Any,
) -> SequenceChunk:
    return SequenceChunk(
        sequence_id=0,
        token_ids=list(tokens),
        start=len(tokens) - 1,
        end=len(tokens),
        block_table=[0],
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(temperature=0.0, **params),
        sample=True,
        eos_token_ids=frozenset({EOS}),
        constraint=constraint,
    )


def possible(request: SequenceChunk) -> list[int]:
    row = torch.zeros(VOCAB_SIZE)
    shape_row(row, request)
    return [token for token, value in enumerate(row.tolist()) if value > -math.inf]


def test_bias_is_added_to_known_tokens() -> None:
    row = torch.zeros(VOCAB_SIZE)
    shape_row(row, chunk(logit_bias=((2, 1.5), (4, -100.0), (99, 5.0))))
    assert row.tolist() == [0.0, 0.0, 1.5, 0.0, -100.0, 0.0]


def test_only_allowed_tokens_are_possible() -> None:
    assert possible(chunk(allowed_token_ids=(3, 5, 99))) == [3, 5]


@pytest.mark.parametrize(
    ("tokens", "words", "forbidden"),
    [
        ((1, 2), ((4,),), {4}),
        ((1, 2), ((2, 3),), {3}),
        ((1, 2), ((1, 2, 3),), set()),  # the first token is the prompt's
        ((1, 2, 5), ((2, 5, 4), (5, 99), (5, 1)), {4, 1}),
        ((1,), ((2, 3), (5,)), {5}),
    ],
)
def test_bad_words_are_not_completed(
    tokens: tuple[int, ...], words: tuple[tuple[int, ...], ...], forbidden: set[int]
) -> None:
    assert set(range(VOCAB_SIZE)) - set(possible(chunk(tokens, bad_words=words))) == forbidden


def test_a_structure_sees_the_output_alone() -> None:
    only = Only(4)
    assert possible(chunk((1, 2, 3), 1, only)) == [4]
    assert only.asked == [[2, 3]]


def test_a_structure_wins_over_bias_and_words() -> None:
    assert possible(chunk(constraint=Only(3), allowed_token_ids=(5,))) == [3]
    assert possible(chunk(constraint=Only(3), bad_words=((3,),))) == [3]


def test_a_complete_structure_may_end_before_min_tokens() -> None:
    assert possible(chunk(constraint=Only(EOS, 3), min_tokens=9)) == [3]
    assert possible(chunk(constraint=Only(EOS), min_tokens=9)) == [EOS]


def test_an_error_of_one_structure_leaves_the_others_alone() -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    broken, fine = sample(logits, [chunk(constraint=Broken()), chunk()])
    assert (broken.error, fine.error) == ("cannot go on", "")
    assert fine.token_id == 1
