from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.types import TokenLogprobs
from services.gateway.api.token_scores import LOWEST, ScoresOfText, chosen_score

WORDS = [b"<think>", b" well", b"</think>", b"\n\n", b"an", b" answer", "ü".encode()[:1], b"think"]


def score(token_id: int) -> dict[str, Any]:
    return chosen_score(WORDS.__getitem__, token_id, TokenLogprobs(-1.0, (5,), (-0.5,)))


def ids(scores: list[dict[str, Any]]) -> list[int]:
    return [WORDS.index(bytes(each["bytes"])) for each in scores]


def test_a_score_has_the_token_and_those_it_was_chosen_from() -> None:
    unlikely = TokenLogprobs(float("-inf"), (5, 6), (-0.5, -2.0))
    assert chosen_score(WORDS.__getitem__, 4, unlikely) == {
        "token": "an",
        "logprob": LOWEST,
        "bytes": [97, 110],
        "top_logprobs": [
            {"token": " answer", "logprob": -0.5, "bytes": list(b" answer")},
            {"token": "\ufffd", "logprob": -2.0, "bytes": [0xC3]},
        ],
    }


def test_marks_and_dropped_white_space_belong_to_no_text() -> None:
    scores = ScoresOfText()
    scores.add([score(token_id) for token_id in range(6)])
    assert ids(scores.take(" well")) == [1]
    assert ids(scores.take("an answer")) == [4, 5]
    assert scores.take("more") == []


def test_the_word_of_a_mark_is_not_the_text() -> None:
    scores = ScoresOfText()
    scores.add([score(token_id) for token_id in (2, 3, 7)])
    assert ids(scores.take("think")) == [7]
    assert scores.take("more") == []


def test_a_character_of_several_tokens_has_all_that_wait() -> None:
    scores = ScoresOfText()
    scores.add([score(6)])
    scores.add([score(6)])
    assert ids(scores.take("ü")) == [6, 6]


@given(st.lists(st.sampled_from([1, 4, 5]), min_size=1), st.integers(0))
def test_every_token_of_plain_text_is_told_once(token_ids: list[int], cut: int) -> None:
    scores, told = ScoresOfText(), []
    scores.add([score(token_id) for token_id in token_ids])
    ends = cut % len(token_ids)
    for part in (token_ids[:ends], token_ids[ends:]):
        if part:
            told += ids(scores.take(b"".join(WORDS[token_id] for token_id in part).decode()))
    assert told == token_ids
