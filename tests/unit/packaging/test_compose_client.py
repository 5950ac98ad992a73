from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from scripts.compose_client import NUM_TOKENS, Answer, CheckError, check_answer, parse_event

GOOD = Answer(
    worker="decode-0",
    text="text",
    pieces=[1] * NUM_TOKENS,
    finish_reason="length",
    usage={"completion_tokens": NUM_TOKENS},
    done=True,
)


def event(**body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n"


def test_a_stream_is_put_together() -> None:
    answer = Answer("decode-0")
    lines = [
        event(choices=[{"text": "a", "token_ids": [5], "finish_reason": None}], usage=None),
        b"\n",
        event(choices=[{"text": "bc", "token_ids": [6, 7], "finish_reason": "stop"}], usage=None),
        event(choices=[], usage={"completion_tokens": 3}),
        b"data: [DONE]\n",
    ]
    for line in lines:
        parse_event(answer, line)
    assert answer == Answer("decode-0", "abc", [1, 2], "stop", {"completion_tokens": 3}, done=True)


def test_an_error_in_the_stream_is_not_overlooked() -> None:
    with pytest.raises(CheckError, match="worker is gone"):
        parse_event(Answer("decode-0"), event(error={"message": "worker is gone"}))


def test_a_whole_answer_passes() -> None:
    check_answer(GOOD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"done": False}, "without \\[DONE\\]"),
        ({"finish_reason": ""}, "finish reason ''"),
        ({"pieces": [1] * (NUM_TOKENS - 1)}, "tokens came"),
        ({"pieces": [NUM_TOKENS]}, "one by one: 1 events"),
        ({"usage": {"completion_tokens": NUM_TOKENS + 1}}, "usage says"),
    ],
)
def test_a_faulty_answer_does_not(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckError, match=message):
        check_answer(replace(GOOD, **change))
