"""Fields and routes beyond plain generation, over HTTP with the official client, on a fake mesh."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvmesh.core.types import Structure, StructureKind
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import Stack, gateway_stack
from tests.unit.gateway.tiny_model import TOOL_TEMPLATE

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ARGUMENTS = '{"city": "Rome"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with gateway_stack(tmp_path, template=TOOL_TEMPLATE) as stack:
        yield stack
        await stack.idle()


async def post(stack: Stack, path: str, body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stack.url}{path}", json=body) as response,
    ):
        return response.status, await response.json()


async def test_sampling_fields_reach_the_workers(stack: Stack) -> None:
    await stack.client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        logit_bias={"5": -100, "7": 2},
        extra_body={"allowed_token_ids": [5, 7], "bad_words": ["the"], "guided_regex": "[a-z]+"},
    )
    (spec,) = stack.mesh.workers["p1"].specs
    assert spec.sampling.logit_bias == ((5, -100.0), (7, 2.0))
    assert spec.sampling.allowed_token_ids == (5, 7)
    assert set(spec.sampling.bad_words) == {
        tuple(stack.tokenizer.encode(form).ids) for form in ("the", " the")
    }
    assert spec.sampling.structure == Structure(StructureKind.REGEX, "[a-z]+")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"allowed_token_ids": [320]}, "allowed_token_ids"),
        ({"guided_regex": "[a-z"}, "guided_regex"),
        ({"structured_outputs": {"json": {"type": "foo"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs.grammar"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
    ],
)
async def test_bad_fields_are_named(stack: Stack, change: dict[str, Any], param: str) -> None:
    status, body = await post(stack, "/v1/completions", {"prompt": "a", **change})
    assert status == 400
    assert body["error"]["param"].startswith(param)
    assert param.rpartition(".")[2] in body["error"]["message"]


@pytest.mark.parametrize("prompt", ["\ud800", "a\ude00b"])
async def test_half_a_character_is_no_text(stack: Stack, prompt: str) -> None:
    status, body = await post(stack, "/v1/completions", {"prompt": prompt})
    assert (status, body["error"]["code"]) == (400, "bad_json")
    whole = {"prompt": "\N{GRINNING FACE}", "max_tokens": 1}
    assert (await post(stack, "/v1/completions", whole))[0] == 200


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
TREE = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}


@pytest.mark.parametrize(
    ("choice", "path"),
    [
        ("required", "#/$defs/tools.0/properties/a leads back to #/$defs/tools.0"),
        ({"type": "function", "function": {"name": "f"}}, "#/properties/a leads back to #"),
        ("auto", "tools: f: no finite text satisfies it: #/properties/a leads back to #"),
    ],
)
async def test_tools_that_no_finite_text_calls_are_refused(
    stack: Stack, choice: object, path: str
) -> None:
    function = {"name": "f", "parameters": ENDLESS}
    tools = [{"type": "function", "function": function}]
    body = {"messages": HELLO, "tools": tools, "tool_choice": choice, "max_tokens": 1}
    status, answer = await post(stack, "/v1/chat/completions", body)
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, "tools", "invalid_structure")
    assert error["message"].endswith(path)
    function["parameters"] = TREE
    assert (await post(stack, "/v1/chat/completions", body))[0] == 200


async def test_echo_with_logprobs(stack: Stack) -> None:
    answer = await stack.client.completions.create(
        model=MODEL, prompt="the mesh", echo=True, logprobs=1, max_tokens=2
    )
    (choice,) = answer.choices
    said = stack.tokenizer.decode(stack.mesh.output[:2])
    assert choice.text == "the mesh" + said
    prompt = stack.tokenizer.encode("the mesh").ids
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    expected = [None, *(-token / 8 for token in [*prompt[1:], *stack.mesh.output[:2]])]
    assert logprobs.token_logprobs == expected
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[len(prompt)] == len("the mesh")


async def test_tokens_named_by_their_ids(stack: Stack) -> None:
    asked = {"max_tokens": 2, "return_tokens_as_token_ids": True}
    first, second = (f"token_id:{token}" for token in stack.mesh.output[:2])
    text = {"prompt": [5, 6], "logprobs": 1, "echo": True, **asked}
    _, answer = await post(stack, "/v1/completions", text)
    (choice,) = answer["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6", first, second]
    assert choice["text"] == stack.tokenizer.decode([5, 6, *stack.mesh.output[:2]])
    chat = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, **asked}
    _, answer = await post(stack, "/v1/chat/completions", chat)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [score["token"] for score in content] == [first, second]
    assert content[0]["top_logprobs"][1]["token"] == "token_id:5"


async def test_echo_alone_generates_nothing(stack: Stack) -> None:
    answer = await stack.client.completions.create(
        model=MODEL, prompt=[5, 6, 7], echo=True, max_tokens=0, logprobs=0
    )
    (choice,) = answer.choices
    assert choice.text == stack.tokenizer.decode([5, 6, 7])
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or []) == 3
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)


async def test_echo_in_a_stream_comes_first(stack: Stack) -> None:
    stream = await stack.client.completions.create(
        model=MODEL, prompt="a b", echo=True, max_tokens=3, stream=True
    )
    texts = [chunk.choices[0].text async for chunk in stream]
    assert texts[0] == "a b"
    assert "".join(texts[1:]) == stack.tokenizer.decode(stack.mesh.output[:3])


async def test_prompt_logprobs(stack: Stack) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 2}
    status, answer = await post(stack, "/v1/completions", body)
    assert status == 200
    first, second, third = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["6"]["logprob"] == -0.25
    assert {"6", "5"} == set(second)
    assert third["7"]["decoded_token"] == stack.tokenizer.decode([7])
    chat = {"messages": HELLO, "max_tokens": 1, "prompt_logprobs": 0}
    _, answer = await post(stack, "/v1/chat/completions", chat)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


async def test_usage_on_every_chunk(stack: Stack) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await stack.client.completions.create(
        model=MODEL, prompt="a b", max_tokens=4, stream=True, stream_options=options
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
    assert counts == [1, 2, 3, 4, 4]


async def test_a_truncated_prompt(stack: Stack) -> None:
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 1, "truncate_prompt_tokens": 2}
    _, answer = await post(stack, "/v1/completions", body)
    assert answer["usage"]["prompt_tokens"] == 2
    assert stack.mesh.workers["p1"].specs[0].token_ids == (7, 8)


async def test_a_tool_call(stack: Stack) -> None:
    stack.says(f"Let me look. {CALL}")
    answer = await stack.client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[WEATHER]
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    (spec,) = stack.mesh.workers["p1"].specs
    assert stack.tokenizer.decode(spec.token_ids[:20]).startswith("<tool_call>weather")
    # The call and its result go back into the chat.
    history = [
        *HELLO,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sun"},
    ]
    stack.says("sunny")
    again = await stack.client.chat.completions.create(
        model=MODEL, messages=history, tools=[WEATHER]
    )
    assert again.choices[0].message.content == "sunny"
    assert again.choices[0].finish_reason == "stop"


async def test_a_streamed_tool_call(stack: Stack) -> None:
    stack.says(f"Look: {CALL} {CALL}")
    stream = await stack.client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[WEATHER], stream=True, n=2
    )
    content = {0: "", 1: ""}
    calls: dict[tuple[int, int], dict[str, str]] = {}
    num_argument_pieces = 0
    reasons = {}
    async for chunk in stream:
        (choice,) = chunk.choices
        content[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
        for delta in choice.delta.tool_calls or []:
            call = calls.setdefault((choice.index, delta.index), {"id": "", "args": ""})
            assert delta.function is not None
            call["id"] += delta.id or ""
            call["args"] += delta.function.arguments or ""
            num_argument_pieces += bool(delta.function.arguments)
    assert content == {0: "Look:", 1: "Look:"}
    assert [call["args"] for call in calls.values()] == [ARGUMENTS] * 4
    assert len({call["id"] for call in calls.values()}) == 4
    assert num_argument_pieces > 8
    assert reasons == {0: "tool_calls", 1: "tool_calls"}


async def test_required_and_named_tools_have_a_structure(stack: Stack) -> None:
    stack.says(f'[{{"name": "weather", "parameters": {ARGUMENTS}}}]')
    answer = await stack.client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[WEATHER], tool_choice="required"
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.arguments == ARGUMENTS
    assert answer.choices[0].finish_reason == "tool_calls"
    stack.says(ARGUMENTS)
    answer = await stack.client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    required, named = (spec.sampling.structure for spec in stack.mesh.workers["p1"].specs)
    assert required is not None
    assert named is not None
    assert json.loads(required.text)["minItems"] == 1
    assert json.loads(named.text) == WEATHER["function"]["parameters"]


async def test_without_choice_tools_are_left_out(stack: Stack) -> None:
    stack.says(CALL)
    answer = await stack.client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[WEATHER], tool_choice="none"
    )
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].message.tool_calls is None


async def test_tokenize_and_back(stack: Stack) -> None:
    text = "the mesh moves é"
    status, answer = await post(
        stack, "/tokenize", {"prompt": text, "return_token_strs": True, "model": MODEL}
    )
    assert status == 200
    assert answer["tokens"] == stack.tokenizer.encode(text).ids
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 512
    assert len(answer["token_strs"]) == answer["count"]
    _, back = await post(stack, "/detokenize", {"tokens": answer["tokens"]})
    assert back == {"prompt": text}
    _, chat = await post(stack, "/tokenize", {"messages": HELLO})
    expected = "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    assert chat["tokens"] == stack.tokenizer.encode(expected).ids
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": HELLO}),
        ("/detokenize", {"tokens": [320]}),
        ("/detokenize", {}),
    ):
        status, answer = await post(stack, path, body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_the_tokenizer_tells_of_itself(stack: Stack) -> None:
    async with aiohttp.ClientSession(stack.url) as session, session.get("/tokenizer_info") as told:
        info = await told.json()
    assert info["eos_token"] == "<|end|>"
    assert "<|start|>" in info["chat_template"]
    assert "pad_token" in info


async def test_the_openapi_page(stack: Stack) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{stack.url}/openapi.json") as response,
    ):
        page = await response.json()
    for path in page["paths"]:
        method = "POST" if "post" in page["paths"][path] else "GET"
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"{stack.url}{path}", data=b"{}") as response,
        ):
            assert response.status in (200, 400), path


BENCH_SERVE: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/completions",
        {
            "model": MODEL,
            "prompt": "the mesh",
            "temperature": 0.0,
            "max_tokens": 4,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "repetition_penalty": 1.0,
            "ignore_eos": True,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "the mesh"}]}],
            "temperature": 0.0,
            "max_completion_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), BENCH_SERVE)
async def test_shapes_of_vllm_bench_serve(stack: Stack, path: str, body: dict[str, Any]) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stack.url}{path}", json=body) as response,
    ):
        assert response.status == 200
        lines = (await response.text()).split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    assert lines[-2:] == ["data: [DONE]", ""]
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert events[-1]["choices"] == []
    assert sum("choices" in event and bool(event["choices"]) for event in events) >= 4
