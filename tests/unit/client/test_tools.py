from __future__ import annotations

import json
from typing import Any

import pytest

from kvmesh.client.messages import GenerateOptions, Prompt, request_message
from kvmesh.client.tools import Message, Tool, ToolCall, ToolCallDelta, joined_calls
from kvmesh.core.errors import InvalidRequestError
from kvmesh.v1 import inference_service_pb2 as pb

CHAT = [
    Message(role="user", content="What?"),
    Message(
        role="assistant",
        content="",
        reasoning="hm",
        tool_calls=[ToolCall("a", "weather", "{}")],
    ),
    Message(role="tool", content="sun", tool_call_id="a"),
]
WEATHER = Tool("weather", "Tells the weather.", {"type": "object"})


def test_a_chat_with_tools() -> None:
    message = request_message(
        CHAT,
        {
            "tools": [WEATHER, Tool("time")],
            "parallel_tool_calls": False,
            "template_arguments": {"enable_thinking": False},
        },
        "",
    )
    _, turn, result = message.chat.messages
    assert turn.reasoning == "hm"
    assert turn.tool_calls == [pb.ToolCall(id="a", name="weather", arguments_json="{}")]
    assert result.tool_call_id == "a"
    weather, time = message.chat.tools
    assert (weather.name, json.loads(weather.parameters_json)) == ("weather", {"type": "object"})
    assert (time.name, time.parameters_json) == ("time", "")
    assert message.chat.single_call
    assert json.loads(message.chat.template_arguments_json) == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", (pb.TOOL_CHOICE_UNSPECIFIED, "")),
        ("none", (pb.TOOL_CHOICE_NONE, "")),
        ("required", (pb.TOOL_CHOICE_REQUIRED, "")),
        ("weather", (pb.TOOL_CHOICE_UNSPECIFIED, "weather")),
    ],
)
def test_choices(choice: str, expected: tuple[int, str]) -> None:
    chat = request_message(CHAT, {"tools": [WEATHER], "tool_choice": choice}, "").chat
    assert (chat.tool_choice, chat.chosen_tool) == expected


BAD: list[tuple[Prompt, Any, str]] = [
    ("text", {"tools": [WEATHER]}, "tools"),
    (CHAT, {"tools": ["weather"]}, "tools"),
    (CHAT, {"template_arguments": {"a": object()}}, "template_arguments"),
    ([{"role": "user", "content": "a", "tool_calls": ["x"]}], {}, "prompt"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("prompt", "options", "param"), BAD)
def test_bad_values_name_the_field(prompt: Prompt, options: GenerateOptions, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_message(prompt, options, "")
    assert caught.value.param == param


def test_calls_are_joined_from_their_parts() -> None:
    parts = [
        ToolCallDelta(0, "a", "weather", ""),
        ToolCallDelta(0, "", "", '{"city": '),
        ToolCallDelta(1, "b", "time", "{}"),
        ToolCallDelta(0, "", "", '"Rome"}'),
    ]
    assert joined_calls(parts) == (
        ToolCall("a", "weather", '{"city": "Rome"}'),
        ToolCall("b", "time", "{}"),
    )
