from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvmesh.core.errors import InvalidRequestError, ModelNotFoundError
from kvmesh.core.types import RequestId, SamplingParams
from services.gateway.api.messages import MAX_MESSAGES
from services.gateway.api.model_checks import (
    ServedNames,
    check_call,
    check_prompt,
    choice_sampling,
)
from services.gateway.api.openai import (
    ApiCall,
    ChatPrompt,
    Endpoint,
    TextPrompt,
    TokenPrompt,
    chat_call,
    completion_call,
)
from services.gateway.api.schema import ChatBody, CompletionBody, parse_body
from services.gateway.config import LimitsConfig
from services.gateway.request.mesh import GenerationRequest
from services.gateway.request.search import claim_of
from services.gateway.tools.parsers import ToolFamily

LIMITS = LimitsConfig()
VOCAB = 320
MESSAGES = [{"role": "user", "content": "hi"}]
TEXT_PART = {"type": "text", "text": "a"}


def chat(**fields: Any) -> ApiCall:
    return chat_call(parse_body(ChatBody, {"messages": MESSAGES, **fields}), LIMITS)


def completion(**fields: Any) -> ApiCall:
    return completion_call(parse_body(CompletionBody, {"prompt": "hi", **fields}), LIMITS)


def test_defaults() -> None:
    call = chat()
    assert call.endpoint is Endpoint.CHAT
    assert call.sampling == SamplingParams(num_logprobs=-1)
    assert (call.seed, call.max_tokens, call.n, call.stop) == (None, None, 1, ())
    assert (call.stream, call.include_usage, call.include_stop) == (False, False, False)
    assert completion().max_tokens == 16


def test_model_defaults_give_way_to_the_caller() -> None:
    body = parse_body(ChatBody, {"messages": MESSAGES, "temperature": 1.5})
    call = chat_call(body, LIMITS, {"temperature": 0.25, "top_k": 7})
    assert (call.sampling.temperature, call.sampling.top_k) == (1.5, 7)


def test_content_parts_become_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "name": "x"}]
    (prompt,) = chat(messages=messages).prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == (
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "name": "x"},
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", (TextPrompt("a"),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([1, 2], (TokenPrompt((1, 2)),)),
        ([[1], [2, 3]], (TokenPrompt((1,)), TokenPrompt((2, 3)))),
    ],
)
def test_prompt_forms(prompt: Any, expected: tuple[Any, ...]) -> None:
    assert completion(prompt=prompt).prompts == expected


def test_sampling_fields() -> None:
    call = completion(
        temperature=0,
        top_k=-1,
        min_p=0.1,
        seed=-2,
        stop="x",
        stop_token_ids=[3],
        ignore_eos=True,
        min_tokens=2,
        logprobs=4,
    )
    assert call.sampling == SamplingParams(
        temperature=0,
        min_p=0.1,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(3,),
        num_logprobs=4,
    )
    assert (call.seed, call.stop) == (2**64 - 2, ("x",))


@pytest.mark.parametrize(
    ("fields", "num_logprobs"),
    [({}, -1), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 5}, 5)],
)
def test_chat_logprobs(fields: dict[str, Any], num_logprobs: int) -> None:
    assert chat(**fields).sampling.num_logprobs == num_logprobs


def test_priority_is_a_place_in_the_tenants_queue() -> None:
    call = chat(priority=-3)
    assert call.priority == -3
    request = GenerationRequest(
        RequestId("r"), "m", (5, 6), b"", SamplingParams(), 0.0, 1.0, rank=-3
    )
    claim = claim_of(request)
    assert (claim.rank, claim.cost) == (-3, 2)
    assert claim_of(request, is_resumed=True).rank < -3


def test_newer_name_of_max_tokens_wins() -> None:
    call = chat(max_tokens=5, max_completion_tokens=7)
    assert (call.max_tokens, call.max_tokens_field) == (7, "max_completion_tokens")


def test_harmless_fields_are_ignored() -> None:
    call = chat(
        user="me",
        metadata={"a": "b"},
        response_format={"type": "text"},
        tools=[],
        logit_bias={},
        allowed_token_ids=[],
        best_of=1,
        something_new=1,
        tool_choice="auto",
    )
    assert call == chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)}, "messages"),
        (
            {"messages": [{"role": "user", "content": [TEXT_PART] * (MAX_MESSAGES + 1)}]},
            "messages",
        ),
        ({"messages": [{"role": "user", "content": [TEXT_PART] * 101}] * 100}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}] * 101}] * 100}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"logit_bias": {"a": 2}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"bad_words": [""]}, "bad_words"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert param.partition("[")[0] in str(caught.value)


def test_a_picture_is_refused_by_its_type() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(InvalidRequestError, match=r"type 'image_url' is not .*: 'text'") as caught:
        chat(messages=[{"role": "user", "content": [picture]}])
    assert caught.value.param == "messages[0].content"


def test_unsupported_says_what_is_allowed() -> None:
    with pytest.raises(InvalidRequestError, match=r"allowed: null, \['text'\]"):
        chat(modalities=["text", "audio"])


@pytest.mark.parametrize("prompt", [None, [], 5, [["a"]], [[]] * 65])
def test_bad_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(prompt=prompt)
    assert (caught.value.param or "").startswith("prompt")


def test_body_must_be_an_object() -> None:
    with pytest.raises(InvalidRequestError, match="JSON object"):
        parse_body(ChatBody, [1])


def test_choices_get_consecutive_seeds() -> None:
    sampling = check_prompt(chat(n=2, max_tokens=4), 10, 100)
    seeds = [choice_sampling(sampling, 2**64 - 1, choice).seed for choice in (0, 1)]
    assert seeds == [2**64 - 1, 0]


def test_a_forced_call_goes_before_the_form_of_a_text() -> None:
    def tooled(**fields: Any) -> ApiCall:
        body = parse_body(ChatBody, {"messages": MESSAGES, **fields})
        return chat_call(body, LIMITS, family=ToolFamily.HERMES)

    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    tools: dict[str, Any] = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }
    forced = tooled(**tools)
    both = tooled(**tools, response_format={"type": "json_object"})
    assert forced.sampling.structure is not None
    assert both.sampling.structure == forced.sampling.structure
    free = tooled(**{**tools, "tool_choice": "auto"}, response_format={"type": "json_object"})
    assert free.sampling.structure not in (None, forced.sampling.structure)


def test_max_tokens_is_what_the_context_leaves() -> None:
    assert check_prompt(chat(), 10, 100).max_tokens == 90
    assert check_prompt(chat(max_tokens=90), 10, 100).max_tokens == 90


@pytest.mark.parametrize(
    ("call", "num_prompt_tokens", "param"),
    [
        (chat(max_tokens=91), 10, "max_tokens"),
        (chat(max_completion_tokens=91), 10, "max_completion_tokens"),
        (chat(), 100, "messages"),
        (completion(), 100, "prompt"),
    ],
)
def test_context_overflow(call: ApiCall, num_prompt_tokens: int, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_prompt(call, num_prompt_tokens, 100)
    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")


def test_model_name() -> None:
    served = ServedNames(("tiny", "gpt-4o"), {"sql": "sql@1", "tiny": "tiny@1"})
    assert [served.adapter(name) for name in ("", "tiny", "gpt-4o")] == ["", "", ""]
    assert served.adapter("sql") == "sql@1"
    with pytest.raises(ModelNotFoundError, match="'py' does not exist here; served: tiny, gpt-4o"):
        served.adapter("py")  # removed since the model's frontend was found


def test_an_empty_prompt() -> None:
    with pytest.raises(InvalidRequestError, match="prompt must hold"):
        check_prompt(completion(), 0, 100)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"logit_bias": {"320": 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [1, 320]}, "allowed_token_ids"),
        ({"prompt": [0, 320]}, "prompt"),
        ({"prompt": [[0], [1, 320]]}, "prompt"),
        ({"n": 17, "prompt": ["a"] * 8}, "n"),
    ],
)
def test_what_is_wrong_before_its_prompts_are_tokens(changes: dict[str, Any], param: str) -> None:
    limits = replace(LIMITS, max_choices=32)
    body = parse_body(CompletionBody, {"prompt": "a", **changes})
    call = completion_call(body, limits)
    with pytest.raises(InvalidRequestError) as caught:
        check_call(call, limits, VOCAB)
    assert caught.value.param == param
