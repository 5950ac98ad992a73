"""Anthropic's Messages API with the official client, on a fake mesh; its types check answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from kvmesh.core.types import Structure, StructureKind
from services.gateway.config import AccessConfig
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import Stack, gateway_stack
from tests.integration.test_gateway_api import ARGUMENTS, CALL
from tests.integration.test_gateway_responses import TEMPLATE, prompt

WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
_EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def client_of(stack: Stack, key: str = "key") -> AsyncAnthropic:
    return AsyncAnthropic(base_url=stack.url, api_key=key, max_retries=0)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with gateway_stack(tmp_path, template=TEMPLATE) as stack:
        yield stack
        await stack.idle()


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncAnthropic]:
    async with client_of(stack) as client:
        yield client


def asked(**fields: Any) -> Any:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": MODEL, "max_tokens": 200, "messages": messages, **fields}


async def events_of(client: AsyncAnthropic, **fields: Any) -> list[Any]:
    """The events of a stream, each held against the official client's types."""
    stream = await client.messages.create(**asked(stream=True, **fields))
    events = [event async for event in stream]
    for event in events:
        _EVENTS.validate_python(event.to_dict())
    return events


def without_deltas(events: list[Any]) -> list[str]:
    return [each.type for each in events if each.type != "content_block_delta"]


async def test_a_message(stack: Stack, client: AsyncAnthropic) -> None:
    answer = await client.messages.create(
        **asked(
            system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
            metadata={"user_id": "somebody"},
            extra_body={"temperature": 0, "top_k": 5},
        )
    )
    Message.model_validate(answer.to_dict())
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == "one request, one handoff"
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == len(stack.mesh.output) + 1
    assert answer.usage.cache_read_input_tokens == 3
    sent = stack.mesh.workers["p1"].specs[-1]
    assert answer.usage.input_tokens == len(sent.token_ids) - 3
    assert (sent.sampling.temperature, sent.sampling.top_k) == (0.0, 5)
    assert prompt(stack) == (
        "<|start|>system\nbe brief<|end|>\n<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    )
    counted = await client.messages.count_tokens(
        model=MODEL, system="be brief", messages=[{"role": "user", "content": "hello"}]
    )
    assert counted.input_tokens == len(sent.token_ids)


async def test_how_a_message_ends(stack: Stack, client: AsyncAnthropic) -> None:
    cut = await client.messages.create(**asked(max_tokens=2))
    assert cut.stop_reason == "max_tokens"
    stopped = await client.messages.create(**asked(stop_sequences=["nothing", ", one"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ", one")
    assert stopped.content[0].to_dict() == {"type": "text", "text": "one request"}
    events = await events_of(client, stop_sequences=[", one"])
    assert events[-2].delta.to_dict() == {"stop_reason": "stop_sequence", "stop_sequence": ", one"}


async def test_a_streamed_message(client: AsyncAnthropic) -> None:
    whole = await client.messages.create(**asked())
    events = await events_of(client)
    assert without_deltas(events) == [
        *("message_start", "content_block_start", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert sum(each.type == "content_block_delta" for each in events) > 3
    start = events[0].message
    assert start.usage.input_tokens == whole.usage.input_tokens
    assert start.usage.output_tokens == 0
    async with client.messages.stream(**asked()) as stream:
        assert "".join([text async for text in stream.text_stream]) == "one request, one handoff"
        final = await stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [b.to_dict() for b in whole.content]
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_thinking_is_a_block_that_goes_back(stack: Stack, client: AsyncAnthropic) -> None:
    tokens = stack.says("<think>\nlet me see\n</think>\n\nyes")
    whole = await client.messages.create(**asked())
    Message.model_validate(whole.to_dict())
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.content[0].type == "thinking"
    assert whole.content[0].thinking == "let me see"
    assert whole.usage.output_tokens_details is not None
    num_thought = whole.usage.output_tokens_details.thinking_tokens
    assert len(tokens) - 4 <= num_thought < len(tokens)
    events = await events_of(client)
    assert without_deltas(events)[1:-2] == ["content_block_start", "content_block_stop"] * 2
    parts = [{"type": "text", "text": text} for text in ("and ", "now")]
    history = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": parts},
    ]
    await client.messages.create(**asked(messages=history))
    assert "<think>let me see</think><|start|>assistant\nyes<|end|>" in prompt(stack)
    assert "<|start|>user\nand now<|end|>" in prompt(stack)
    hidden = await client.messages.create(**asked(thinking={"type": "disabled"}))
    assert [block.type for block in hidden.content] == ["text"]
    assert prompt(stack).endswith("<effort none>")
    await client.messages.create(**asked(output_config={"effort": "max"}))
    assert prompt(stack).endswith("<effort xhigh>")


async def test_tool_calls_and_what_they_gave(stack: Stack, client: AsyncAnthropic) -> None:
    stack.says(f"<think>hm</think>Look: {CALL} {CALL}")
    whole = await client.messages.create(**asked(tools=[WEATHER]))
    Message.model_validate(whole.to_dict())
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.stop_reason == "tool_use"
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Rome"})] * 2
    assert len({call.id for call in calls}) == 2
    results: Any = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "sun"},
        {
            "type": "tool_result",
            "tool_use_id": calls[1].id,
            "content": [{"type": "text", "text": "rain"}],
            "is_error": True,
        },
        {"type": "text", "text": "well?"},
    ]
    stack.says("sunny")
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": results},
    ]
    await client.messages.create(**asked(messages=messages, tools=[WEATHER]))
    told = "".join(f'<call {call.id} weather {{"city": "Rome"}}>' for call in calls)
    assert f"<think>hm</think>{told}<|start|>assistant\nLook:<|end|>" in prompt(stack)
    assert f"<of {calls[0].id} weather><|start|>tool\nsun<|end|>" in prompt(stack)
    assert f"<of {calls[1].id} weather><|start|>tool\nrain<|end|>" in prompt(stack)
    assert "<|start|>user\nwell?<|end|>" in prompt(stack)


async def test_streamed_tool_calls(stack: Stack, client: AsyncAnthropic) -> None:
    stack.says(f"Look: {CALL} {CALL}")
    events = await events_of(client, tools=[WEATHER])
    started = [each.content_block.type for each in events if each.type == "content_block_start"]
    assert started == ["text", "tool_use", "tool_use"]
    written = "".join(
        each.delta.partial_json
        for each in events
        if each.type == "content_block_delta" and each.delta.type == "input_json_delta"
    )
    assert written == ARGUMENTS * 2
    one = asked(tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    async with client.messages.stream(**one) as stream:
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use"]
    assert final.content[1].to_dict()["input"] == {"city": "Rome"}
    assert final.stop_reason == "tool_use"


async def test_a_chosen_tool_and_a_schema(stack: Stack, client: AsyncAnthropic) -> None:
    stack.says(ARGUMENTS)
    choice = {"type": "tool", "name": "weather"}
    answer = await client.messages.create(**asked(tools=[WEATHER], tool_choice=choice))
    (call,) = answer.content
    assert call.to_dict() | {"id": ""} == {
        "type": "tool_use",
        "id": "",
        "name": "weather",
        "input": {"city": "Rome"},
    }
    assert answer.stop_reason == "tool_use"
    stack.says(f"[{{'name': 'weather', 'parameters': {ARGUMENTS}}}]".replace("'", '"'))
    any_of = await client.messages.create(**asked(tools=[WEATHER], tool_choice={"type": "any"}))
    assert [block.type for block in any_of.content] == ["tool_use"]
    # JSON that max_tokens cut is no input.
    cut = await client.messages.create(**asked(tools=[WEATHER], tool_choice=choice, max_tokens=3))
    assert cut.stop_reason == "max_tokens"
    assert [block.to_dict()["input"] for block in cut.content] == [{}]
    schema = {"type": "json_schema", "schema": WEATHER["input_schema"]}
    await client.messages.create(**asked(output_config={"format": schema}))
    structure = stack.mesh.workers["p1"].specs[-1].sampling.structure
    assert isinstance(structure, Structure)
    assert structure.kind is StructureKind.JSON_SCHEMA
    assert '"city"' in structure.text


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 9999}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "assistant", "content": "I"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers"),
    ({"container": "x"}, "container"),
]


async def test_bad_fields_are_named_in_anthropic_s_form(client: AsyncAnthropic) -> None:
    for change, name in BAD:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(**asked(**change))
        body: Any = caught.value.body
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        assert name in body["error"]["message"], change
        assert caught.value.request_id == body["request_id"]
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(**asked(model="another"))
    assert missing.value.body["error"]["type"] == "not_found_error"


async def test_the_key_comes_in_anthropic_s_header(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path, access=AccessConfig(api_keys="right")) as stack:
        async with client_of(stack, "right") as client:
            await client.messages.create(**asked())
        async with client_of(stack, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(**asked())
            assert caught.value.body["error"]["type"] == "authentication_error"
        # Elsewhere the header says nothing.
        async with (
            aiohttp.ClientSession(stack.url, headers={"x-api-key": "right"}) as session,
            session.get("/v1/models") as answer,
        ):
            assert answer.status == 401
        await stack.idle()


async def test_a_message_that_is_lost_ends_with_an_error(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path, limits={"max_moves": 0}) as stack:
        stack.mesh.workers["d1"].does.fail_decode_after = 2
        stack.mesh.go.clear()  # the stream begins before anything is lost
        async with client_of(stack) as client:
            stream = await client.messages.create(**asked(stream=True))
            assert (await anext(stream)).type == "message_start"
            stack.mesh.go.set()
            with pytest.raises(anthropic.APIStatusError) as caught:
                _ = [event async for event in stream]
        assert caught.value.body["error"]["type"] == "api_error"
        await stack.idle()
