from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvmesh.client.messages import (
    GenerateOptions,
    PlacedAt,
    Prompt,
    delta_of,
    generation_of,
    request_message,
)
from kvmesh.core.errors import InvalidRequestError, ProtocolError
from kvmesh.core.types import (
    FinishReason,
    Placement,
    Structure,
    StructureKind,
    TokenLogprobs,
    Usage,
)
from kvmesh.v1 import inference_service_pb2 as pb
from kvmesh.v1 import types_pb2


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("hello", "text"),
        ("", "text"),
        ([1, 2, 3], "tokens"),
        ((), "tokens"),
        ([{"role": "user", "content": "hi"}], "chat"),
    ],
)
def test_prompt_kinds(prompt: Prompt, kind: str) -> None:
    assert request_message(prompt, {}, "").WhichOneof("prompt") == kind


def test_prompt_content() -> None:
    chat = request_message([{"role": "user", "content": "hi"}], {}, "").chat.messages
    assert [(entry.role, entry.content) for entry in chat] == [("user", "hi")]
    assert list(request_message([7, 8], {}, "").tokens.token_ids) == [7, 8]


@pytest.mark.parametrize("prompt", [[-1], [1 << 40], ["a"], [{"role": "user"}], [1.5], 5])
def test_bad_prompts_name_the_field(prompt: Prompt) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_message(prompt, {}, "")
    assert caught.value.param == "prompt"


def test_no_sampling_option_leaves_sampling_to_the_gateway() -> None:
    assert not request_message("x", {"model": "m", "stop": "."}, "").HasField("sampling")


def test_one_sampling_option_sends_all_of_them() -> None:
    options: GenerateOptions = {"max_tokens": 5, "stop_token_ids": [3]}
    sampling = request_message("x", options, "").sampling
    assert sampling.max_tokens == 5
    assert list(sampling.stop_token_ids) == [3]
    assert sampling.temperature == 1.0  # an unset float would read as greedy
    assert sampling.num_logprobs == -1


def test_sampling_out_of_range() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_message("x", {"max_tokens": -1}, "")
    assert caught.value.param == "sampling"


def test_options_become_fields() -> None:
    options: GenerateOptions = {
        "stop": ["a", "b"],
        "request_id": "r",
        "ttft_deadline_s": 1.5,
        "scenario": "chat",
        "cache_salt": "s",
        "placement": Placement.AGGREGATED,
    }
    message = request_message("x", options, "default")
    assert message.model == "default"
    assert list(message.stop) == ["a", "b"]
    assert (message.request_id, message.scenario, message.cache_salt) == ("r", "chat", "s")
    assert message.ttft_deadline_ms == 1500
    assert message.placement == types_pb2.PLACEMENT_MODE_AGGREGATED
    assert request_message("x", {"model": "mine"}, "default").model == "mine"


def test_a_tiny_deadline_is_not_the_default() -> None:
    assert request_message("x", {"ttft_deadline_s": 1e-6}, "").ttft_deadline_ms == 1


@pytest.mark.parametrize("seconds", [-1.0, 1e9, float("nan")])
def test_a_deadline_that_is_none(seconds: float) -> None:
    with pytest.raises(InvalidRequestError):
        request_message("x", {"ttft_deadline_s": seconds}, "")


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="max_token"):
        request_message("x", {"max_token": 5}, "")  # type: ignore[typeddict-unknown-key]


def _response(**fields: object) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id="r", **fields)  # type: ignore[arg-type]


def test_generation_joins_its_pieces() -> None:
    pieces = [
        _response(
            text="a", token_ids=[1, 2], logprobs=[types_pb2.TokenLogprobs(logprob=-1, top_ids=[4])]
        ),
        _response(
            text="b",
            token_ids=[3],
            finish_reason=types_pb2.FINISH_REASON_STOP,
            usage=pb.Usage(prompt_tokens=9, completion_tokens=3, cached_tokens=8),
        ),
    ]
    generation = generation_of(delta_of(piece) for piece in pieces)
    assert generation.text == "ab"
    assert generation.token_ids == (1, 2, 3)
    assert generation.logprobs == (TokenLogprobs(-1.0, (4,), ()),)
    assert generation.finish_reason is FinishReason.STOP
    assert generation.usage == Usage(9, 3, 8)


def test_a_generation_needs_an_end() -> None:
    with pytest.raises(ProtocolError):
        generation_of([delta_of(_response(text="a"))])
    with pytest.raises(ProtocolError):
        generation_of([])


def test_import_pulls_in_nothing_heavy() -> None:
    heavy = "aiohttp uvloop opentelemetry pydantic redis torch rich prometheus_client"
    program = (
        "import sys, kvmesh.client\n"
        f"print(*[name for name in {heavy.split()} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_options_for_choosing_tokens() -> None:
    options: GenerateOptions = {
        "logit_bias": {5: -1.0},
        "allowed_token_ids": [5, 6],
        "bad_words": [[1, 2]],
        "num_prompt_logprobs": 0,
        "structure": Structure(StructureKind.REGEX, "a+"),
    }
    sampling = request_message("x", options, "").sampling
    assert [(entry.token_id, entry.bias) for entry in sampling.logit_bias] == [(5, -1.0)]
    assert list(sampling.allowed_token_ids) == [5, 6]
    assert [list(word.token_ids) for word in sampling.bad_words] == [[1, 2]]
    assert sampling.HasField("num_prompt_logprobs")
    assert (sampling.structure.kind, sampling.structure.text) == (
        types_pb2.STRUCTURE_KIND_REGEX,
        "a+",
    )


def test_bad_bias_names_the_field() -> None:
    options: Any = {"logit_bias": [5]}
    with pytest.raises(InvalidRequestError) as caught:
        request_message("x", options, "")
    assert caught.value.param == "sampling"


def test_where_it_ran_is_of_the_last_piece() -> None:
    def piece(worker: str, **more: Any) -> pb.GenerateResponse:
        placed = pb.PlacedAt(
            placement=types_pb2.PLACEMENT_MODE_DISAGGREGATED,
            prefill_worker="p",
            decode_worker=worker,
        )
        return pb.GenerateResponse(placed=placed, **more)

    first = delta_of(piece("d1", prompt_logprobs=[types_pb2.TokenLogprobs(logprob=-1.0, rank=3)]))
    last = delta_of(piece("d2", finish_reason=types_pb2.FINISH_REASON_STOP))
    whole = generation_of([first, last])
    assert whole.placed == PlacedAt(Placement.DISAGGREGATED, "p", "d2")
    assert whole.prompt_logprobs == (TokenLogprobs(-1.0, rank=3),)
    assert delta_of(pb.GenerateResponse()).placed is None
