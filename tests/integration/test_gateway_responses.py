"""The Responses API with the official client, on a fake mesh; its types check bodies and events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from kvmesh.core.types import Structure, StructureKind
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import Stack, gateway_stack
from tests.integration.test_gateway_api import ARGUMENTS, CALL
from tests.integration.test_gateway_reasoning import TEMPLATE as THINKING

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
TEMPLATE = THINKING.replace(
    "{{- '<|start|>'",
    """\
{{- '<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '' }}
{%- for call in message.tool_calls or [] %}
{{- '<call ' + call.id + ' ' + call.function.name + ' ' + call.function.arguments | tojson + '>' }}
{%- endfor %}
{{- '<of ' + message.tool_call_id + ' ' ~ message.name + '>' if message.tool_call_id else '' }}
{{- '<|start|>'""",
) + ("{{ '<effort ' + reasoning_effort + '>' if reasoning_effort else '' }}")
_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with gateway_stack(tmp_path, template=TEMPLATE) as stack:
        yield stack
        await stack.idle()


def prompt(stack: Stack) -> str:
    """What the workers were last asked to go on from."""
    text: str = stack.tokenizer.decode(
        stack.mesh.workers["p1"].specs[-1].token_ids, skip_special_tokens=False
    )
    return text


async def events_of(stack: Stack, **fields: Any) -> list[Any]:
    """The events of a stream, each held against the official client's types."""
    async with stack.client.responses.stream(model=MODEL, **{"input": "hello", **fields}) as stream:
        raw = stream._raw_stream  # the client's own reading does not check
        events = [event async for event in raw]
    for event in events:
        _EVENTS.validate_python(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def without_deltas(events: list[Any]) -> list[str]:
    kinds = [event.type.removeprefix("response.") for event in events]
    return [kind for kind in kinds if not kind.endswith(".delta")]


def joined(events: list[Any], kind: str) -> str:
    return "".join(event.delta for event in events if event.type == f"response.{kind}.delta")


def plain(item: BaseModel) -> dict[str, Any]:
    """An item without its id, which differs from answer to answer."""
    return item.model_dump(exclude={"id", "call_id"}, exclude_none=True)


async def test_a_response(stack: Stack) -> None:
    answer = await stack.client.responses.create(
        model=MODEL, instructions="be brief", input="hello", max_output_tokens=50, store=False
    )
    assert answer.output_text == "one request, one handoff"
    assert (answer.status, answer.error) == ("completed", None)
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(stack.mesh.output) + 1
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert answer.usage.input_tokens_details.cached_tokens == 3
    Response.model_validate(answer.to_dict())
    assert prompt(stack) == (
        "<|start|>system\nbe brief<|end|>\n<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    )
    cut = await stack.client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        max_output_tokens=2,
        text={"format": {"type": "json_object"}},
    )
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    (item,) = cut.output
    assert item.type == "message"
    assert item.status == "incomplete"


async def test_a_schema_goes_to_the_workers_and_the_answer_is_parsed(stack: Stack) -> None:
    class City(BaseModel):
        name: str

    stack.says('{"name": "Rome"}')
    answer = await stack.client.responses.parse(model=MODEL, input="hello", text_format=City)
    assert answer.output_parsed == City(name="Rome")
    structure = stack.mesh.workers["p1"].specs[-1].sampling.structure
    assert isinstance(structure, Structure)
    assert structure.kind is StructureKind.JSON_SCHEMA
    assert '"name"' in structure.text


async def test_a_streamed_response(stack: Stack) -> None:
    events = await events_of(stack)
    assert without_deltas(events) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert sum(event.type == "response.output_text.delta" for event in events) > 3
    last = events[-1].response
    assert last.output_text == joined(events, "output_text") == "one request, one handoff"


async def test_thinking_is_an_item_of_its_own(stack: Stack) -> None:
    tokens = stack.says("<think>\nlet me see\n</think>\n\nyes")
    whole = await stack.client.responses.create(model=MODEL, input="hello")
    Response.model_validate(whole.to_dict())
    thinking, message = whole.output
    assert thinking.type == "reasoning"
    assert [part.text for part in thinking.content or ()] == ["let me see"]
    assert message.type == "message"
    assert whole.output_text == "yes"
    assert whole.usage is not None
    num_thought = whole.usage.output_tokens_details.reasoning_tokens
    assert len(tokens) - 4 <= num_thought < len(tokens)
    events = await events_of(stack)
    item = ("output_item.added", "content_part.added")
    assert without_deltas(events) == [
        *("created", "in_progress", *item),
        *("reasoning_text.done", "content_part.done", "output_item.done", *item),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert joined(events, "reasoning_text") == "let me see"
    last = events[-1].response
    assert list(map(plain, last.output)) == list(map(plain, whole.output))
    assert last.usage == whole.usage
    # It goes back into the chat with the answer.
    history: Any = [{"role": "user", "content": "hello"}, *(i.to_dict() for i in whole.output)]
    await stack.client.responses.create(model=MODEL, input=history)
    assert "<think>let me see</think><|start|>assistant\nyes<|end|>" in prompt(stack)


SCORED: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.mark.parametrize("thinks", ["<think>\nlet me see\n</think>\n\n", ""])
async def test_log_probabilities_of_the_message(stack: Stack, thinks: str) -> None:
    stack.says(f"{thinks}yes, it is")
    whole = await stack.client.responses.create(model=MODEL, input="hello", **SCORED)
    Response.model_validate(whole.to_dict())
    assert whole.top_logprobs == 2
    message = whole.output[-1]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    scores = part.logprobs or []
    assert "".join(score.token for score in scores) == "yes, it is"
    assert [top.logprob for top in scores[0].top_logprobs] == [-0.25, -1.5]
    events = await events_of(stack, **SCORED)
    told = [
        score
        for event in events
        if event.type == "response.output_text.delta"
        for score in event.logprobs
    ]
    assert [score.token for score in told] == [score.token for score in scores]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [score.logprob for score in done.logprobs] == [score.logprob for score in scores]


async def test_a_response_cut_while_thinking(stack: Stack) -> None:
    stack.says("<think>let me see what")
    answer = await stack.client.responses.create(model=MODEL, input="hello", max_output_tokens=9)
    (item,) = answer.output
    assert item.type == "reasoning"
    assert (item.status, answer.status) == ("incomplete", "incomplete")
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == 9


async def test_function_calls_and_what_they_gave(stack: Stack) -> None:
    stack.says(f"<think>hm</think>Look: {CALL} {CALL}")
    whole = await stack.client.responses.create(model=MODEL, input="hello", tools=[WEATHER])
    Response.model_validate(whole.to_dict())
    assert [item.type for item in whole.output] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    assert whole.status == "completed"
    assert whole.output_text == "Look:"
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [("weather", ARGUMENTS)] * 2
    assert len({call.call_id for call in calls}) == 2
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls
    ]
    stack.says("sunny")
    history: Any = [{"role": "user", "content": "hello"}, *whole.output, *outputs]
    again = await stack.client.responses.create(model=MODEL, input=history, tools=[WEATHER])
    assert again.output_text == "sunny"
    told = "".join(f'<call {call.call_id} weather {{"city": "Rome"}}>' for call in calls)
    assert f"<think>hm</think>{told}<|start|>assistant\nLook:<|end|>" in prompt(stack)
    assert f"<of {calls[1].call_id} weather><|start|>tool\nsun<|end|>" in prompt(stack)


async def test_streamed_function_calls(stack: Stack) -> None:
    stack.says(f"Look: {CALL}")
    events = await events_of(stack, tools=[WEATHER], parallel_tool_calls=False)
    assert without_deltas(events)[-4:] == [
        *("output_item.added", "function_call_arguments.done", "output_item.done", "completed")
    ]
    assert joined(events, "function_call_arguments") == ARGUMENTS
    async with stack.client.responses.stream(model=MODEL, input="a", tools=[WEATHER]) as stream:
        final = await stream.get_final_response()
    assert final.output[-1].type == "function_call"
    assert final.output[-1].parsed_arguments == {"city": "Rome"}


async def test_a_chosen_function(stack: Stack) -> None:
    stack.says(ARGUMENTS)
    answer = await stack.client.responses.create(
        model=MODEL,
        input="hello",
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
    )
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", ARGUMENTS)
    assert answer.tool_choice.model_dump() == {"type": "function", "name": "weather"}
    assert stack.mesh.workers["p1"].specs[-1].sampling.structure is not None


async def test_the_effort_reaches_the_template(stack: Stack) -> None:
    await stack.client.responses.create(model=MODEL, input="a", reasoning={"effort": "low"})
    assert prompt(stack).endswith("<effort low>")
    await stack.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a"}], reasoning_effort="high"
    )
    assert prompt(stack).endswith("<effort high>")


OUTPUT = {"type": "function_call_output", "call_id": "x", "output": "a"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "x"}, "previous_response_id"),
    ({"store": True}, "store"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"background": True}, "background"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({**SCORED, "top_logprobs": 21}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    (
        {"text": {"format": {"type": "json_schema", "name": "n" * 257, "schema": {}}}},
        "text.format.name",
    ),
    ({"input": ""}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{**OUTPUT, "type": "function_call", "name": "f", "arguments": "{"}]}, "input"),
    ({"input": [{**OUTPUT, "output": [{"type": "input_image"}]}]}, "input"),
    ({"max_output_tokens": 9999}, "max_output_tokens"),
]


async def test_bad_responses_fields(stack: Stack) -> None:
    for change, param in BAD:
        with pytest.raises(openai.BadRequestError) as caught:
            await stack.client.responses.create(**{"model": MODEL, "input": "a", **change})
        assert caught.value.param == param


async def test_a_response_that_is_lost_ends_with_an_event(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path, limits={"max_moves": 0}) as stack:
        stack.mesh.workers["d1"].does.fail_decode_after = 2
        stack.mesh.go.clear()  # the stream begins before anything is lost
        stream = await stack.client.responses.create(model=MODEL, input="hello", stream=True)
        kinds = [(await anext(stream)).type]
        stack.mesh.go.set()
        kinds += [event.type async for event in stream]
        assert kinds.count("response.output_text.delta") >= 1
        assert kinds[-2:] == ["error", "response.failed"]
        await stack.idle()


async def test_usage_of_a_chat_counts_the_thinking(stack: Stack) -> None:
    tokens = stack.says("<think>let me see</think>yes")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "n": 2}
    async with (
        aiohttp.ClientSession(stack.url, raise_for_status=True) as session,
        session.post("/v1/chat/completions", json=body) as answer,
    ):
        usage = (await answer.json())["usage"]
    num_thought = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 2 * (len(tokens) - 3) <= num_thought < 2 * len(tokens)
