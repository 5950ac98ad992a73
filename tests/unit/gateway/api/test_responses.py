from __future__ import annotations

import json
from typing import Any

import pytest

from kvmesh.core.types import FinishReason, SamplingParams, TokenLogprobs, Usage
from services.gateway.api.openai import ApiCall, Endpoint, TextPrompt
from services.gateway.api.responses import ChoiceText, Responses, usage_body

WORDS = {1: b"one", 2: b" two", 3: "ö".encode()[:1]}


def responses(endpoint: Endpoint, num_logprobs: int = -1, **fields: Any) -> Responses:
    call = ApiCall(
        endpoint,
        "tiny",
        (TextPrompt("a"),),
        SamplingParams(num_logprobs=num_logprobs),
        **fields,
    )
    return Responses(call, "r", "tiny", 100, WORDS.__getitem__)


def choice() -> ChoiceText:
    return ChoiceText(
        [8, 9],
        "one two",
        [1, 2],
        [TokenLogprobs(-0.5, (1, 3), (-0.5, -2.0)), TokenLogprobs(-1.0, (2,), (-1.0,))],
        FinishReason.LENGTH,
    )


def test_chat_body() -> None:
    body = responses(Endpoint.CHAT, 2, return_token_ids=True).whole([choice()], {"x": 1})
    assert body["id"] == "chatcmpl-r"
    assert (body["object"], body["usage"]) == ("chat.completion", {"x": 1})
    assert body["prompt_token_ids"] == [8, 9]
    (only,) = body["choices"]
    assert only["message"]["content"] == "one two"
    assert (only["finish_reason"], only["token_ids"]) == ("length", [1, 2])
    first = only["logprobs"]["content"][0]
    assert (first["token"], first["bytes"]) == ("one", list(b"one"))
    assert first["top_logprobs"][1] == {"token": "\ufffd", "logprob": -2.0, "bytes": [0xC3]}


def test_completion_body() -> None:
    body = responses(Endpoint.COMPLETION, 1, return_token_ids=True).whole([choice()], {})
    assert (body["id"], body["object"]) == ("cmpl-r", "text_completion")
    (only,) = body["choices"]
    assert (only["text"], only["prompt_token_ids"]) == ("one two", [8, 9])
    assert only["logprobs"]["tokens"] == ["one", " two"]
    assert only["logprobs"]["text_offset"] == [0, 3]
    assert only["logprobs"]["top_logprobs"][1] == {" two": -1.0}


def test_a_chosen_token_is_among_the_likely_ones_of_a_completion() -> None:
    drawn = ChoiceText([8], "one", [1], [TokenLogprobs(-3.0, (2,), (-0.5,))], FinishReason.LENGTH)
    (only,) = responses(Endpoint.COMPLETION, 1).whole([drawn], {})["choices"]
    assert only["logprobs"]["token_logprobs"] == [-3.0]
    assert only["logprobs"]["top_logprobs"] == [{"one": -3.0, " two": -0.5}]
    (chat,) = responses(Endpoint.CHAT, 1).whole([drawn], {})["choices"]
    (score,) = chat["logprobs"]["content"]
    assert [top["token"] for top in score["top_logprobs"]] == [" two"]


def test_of_tokens_with_one_text_the_likeliest_is_told() -> None:
    words = {1: "ö".encode()[:1], 2: "ü".encode()[1:], 3: b"x"}
    call = ApiCall(Endpoint.COMPLETION, "m", (TextPrompt("a"),), SamplingParams(num_logprobs=3))
    drawn = ChoiceText([8], "x", [3], [TokenLogprobs(-3.0, (1, 2, 3), (-0.5, -1.5, -3.0))])
    (only,) = Responses(call, "r", "m", 100, words.__getitem__).whole([drawn], {})["choices"]
    assert only["logprobs"]["top_logprobs"] == [{"x": -3.0, "\ufffd": -0.5}]


def test_tokens_may_be_named_by_their_ids() -> None:
    made = responses(Endpoint.COMPLETION, 1, echo=True, tokens_as_ids=True)
    told = choice()
    told.prompt_ids, told.echo = [2, 1], " twoone"
    told.prompt_logprobs = [TokenLogprobs(-0.7, (3,), (-0.4,))]
    logprobs = made.whole([told], {})["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:2", "token_id:1", "token_id:1", "token_id:2"]
    # Where a token's text begins does not depend on what the token is called.
    assert logprobs["text_offset"] == [0, 4, 7, 10]
    assert logprobs["top_logprobs"][1] == {"token_id:1": -0.7, "token_id:3": -0.4}
    piece = responses(Endpoint.CHAT, 2, tokens_as_ids=True).piece(
        0, "x", [1], told.logprobs[:1], None
    )
    assert piece is not None
    (score,) = piece["choices"][0]["logprobs"]["content"]
    assert (score["token"], score["bytes"]) == ("token_id:1", list(b"one"))
    assert [top["token"] for top in score["top_logprobs"]] == ["token_id:1", "token_id:3"]


def test_logprobs_only_when_asked_for() -> None:
    for endpoint in Endpoint:
        assert responses(endpoint).whole([choice()], {})["choices"][0]["logprobs"] is None


def test_chunks_of_a_chat() -> None:
    made = responses(Endpoint.CHAT, include_usage=True)
    opening = made.opening(0, ChoiceText([8]))
    assert opening is not None
    assert opening["object"] == "chat.completion.chunk"
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert opening["usage"] is None
    piece = made.piece(1, "one", [1], [], None)
    assert piece is not None
    assert piece["choices"][0]["delta"] == {"content": "one"}
    last = made.piece(1, "", [], [], FinishReason.STOP)
    assert last is not None
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    closing = made.closing_usage({"total_tokens": 3})
    assert (closing["choices"], closing["usage"]) == ([], {"total_tokens": 3})


def test_nothing_to_say_is_no_chunk() -> None:
    made = responses(Endpoint.COMPLETION)
    assert made.opening(0, ChoiceText([8])) is None
    assert made.piece(0, "", [1], [], None) is None
    with_ids = responses(Endpoint.COMPLETION, return_token_ids=True)
    piece = with_ids.piece(0, "", [1], [], None)
    assert piece is not None
    assert piece["choices"][0]["token_ids"] == [1]
    opening = with_ids.opening(0, ChoiceText([8]))
    assert opening is not None
    assert opening["choices"][0]["prompt_token_ids"] == [8]


def test_text_offsets_go_on_over_chunks() -> None:
    made = responses(Endpoint.COMPLETION, 0)
    entry = TokenLogprobs(-1.0)
    pieces = [made.piece(0, "x", [token], [entry], None) for token in (1, 2, 1)]
    assert [piece["choices"][0]["logprobs"]["text_offset"] for piece in pieces if piece] == [
        [0],
        [3],
        [7],
    ]


@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_infinite_logprobs_are_valid_json(endpoint: Endpoint) -> None:
    entry = TokenLogprobs(float("-inf"), (2,), (float("-inf"),))
    piece = responses(endpoint, 1).piece(0, "one", [1], [entry], None)
    assert "-9999.0" in json.dumps(piece, allow_nan=False)


def test_usage_is_summed() -> None:
    assert usage_body([Usage(5, 2, 3), Usage(0, 4, 0)]) == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
