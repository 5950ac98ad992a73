"""How a request's tools become a way to read the answer, and how its calls are told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvmesh.core.errors import InvalidRequestError
from services.gateway.api.schema import ChatBody
from services.gateway.tools.parsers import ToolFamily
from services.gateway.tools.tools import (
    ToolMode,
    ToolReader,
    ToolUse,
    tool_structure,
    tool_use,
    whole_message,
)

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/name"}}}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {**CITY, "$defs": {"name": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
NAMED = {"type": "function", "function": {"name": "time"}}
TWO_CALLS = json.dumps([{"name": "weather", "parameters": {}}, {"name": "time", "parameters": {}}])


def body(**changes: Any) -> ChatBody:
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **changes}
    return ChatBody.model_validate(asked)


def use_of(**changes: Any) -> ToolUse:
    found = tool_use(body(tools=TOOLS, **changes), ToolFamily.HERMES)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, ToolMode.AUTO),
        ({"tool_choice": "auto"}, ToolMode.AUTO),
        ({"tool_choice": "required"}, ToolMode.REQUIRED),
        ({"tool_choice": NAMED}, ToolMode.NAMED),
    ],
)
def test_the_choice_says_how_calls_are_read(changes: dict[str, Any], mode: ToolMode) -> None:
    use = use_of(**changes)
    assert (use.mode, use.names) == (mode, ("weather", "time"))
    assert (tool_structure(use, body(tools=TOOLS).tools or []) is None) == (mode is ToolMode.AUTO)


def test_a_body_that_wants_no_calls_uses_no_tools() -> None:
    assert tool_use(body(), ToolFamily.HERMES) is None
    assert tool_use(body(tools=TOOLS, tool_choice="none"), None) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tool_choice": "required"}, "without tools"),
        ({"tools": TOOLS}, "has no format for calls"),
        (
            {"tools": TOOLS, "tool_choice": {**NAMED, "function": {"name": "x"}}},
            "allowed: weather, time",
        ),
    ],
)
def test_what_cannot_be_is_said(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        tool_use(body(**changes), None)


def test_the_structure_of_required_calls_names_every_tool_and_finds_definitions() -> None:
    tools = body(tools=TOOLS).tools or []
    free = tool_structure(use_of(tool_choice="required"), tools)
    single = tool_structure(use_of(tool_choice="required", parallel_tool_calls=False), tools)
    assert free is not None
    assert single is not None
    schema = json.loads(free.text)
    weather, time = schema["$defs"].values()
    assert weather["properties"]["city"] == {"$ref": "#/$defs/tools.0/$defs/name"}
    assert time == {"type": "object", "properties": {}}
    assert len(schema["items"]["anyOf"]) == 2
    assert "maxItems" not in schema
    assert json.loads(single.text)["maxItems"] == 1


def test_references_of_required_calls_stay_within_their_tool() -> None:
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
    named = {"properties": {"x": {"$ref": "#/$defs/name"}}, "$defs": {"name": {"type": "null"}}}
    other = {**named, "$defs": {"name": {"type": "integer"}}}
    kept = {"$id": "k", "properties": {"x": {"$ref": "#"}}, "const": {"$ref": "#"}}
    values = {"enum": [{"$ref": "#"}], "properties": {"enum": {"$ref": "#"}}}
    tools = [
        {"type": "function", "function": {"name": f"t{number}", "parameters": schema}}
        for number, schema in enumerate((tree, named, other, kept, values))
    ]
    use = ToolUse(ToolMode.REQUIRED, tuple(f"t{number}" for number in range(5)))
    structure = tool_structure(use, body(tools=tools).tools or [])
    assert structure is not None
    defs = json.loads(structure.text)["$defs"]
    assert defs["tools.0"]["properties"]["kids"]["items"] == {"$ref": "#/$defs/tools.0"}
    assert defs["tools.1"]["properties"]["x"] == {"$ref": "#/$defs/tools.1/$defs/name"}
    assert defs["tools.2"]["$defs"]["name"] == {"type": "integer"}
    assert defs["tools.3"] == kept
    assert defs["tools.4"]["enum"] == [{"$ref": "#"}]
    assert defs["tools.4"]["properties"]["enum"] == {"$ref": "#/$defs/tools.4"}


@pytest.mark.parametrize(("parallel", "count"), [(True, 2), (False, 1)])
def test_calls_are_numbered_and_named_and_no_more_than_allowed(parallel: bool, count: int) -> None:
    reader = ToolReader(use_of(tool_choice="required", parallel_tool_calls=parallel), "r1")
    message = whole_message(reader, TWO_CALLS)
    calls = message["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "time"][:count]
    assert [call["id"] for call in calls] == [reader.call_id(index) for index in range(count)]
    assert all(len(call["id"]) == 9 and "index" not in call for call in calls)
    assert len({call["id"] for call in calls}) == count
    assert reader.finish_word == "tool_calls"
    assert reader.call_id(0) != ToolReader(use_of(), "r2").call_id(0)


def test_pieces_of_a_stream_add_up_to_the_same_calls() -> None:
    reader = ToolReader(use_of(tool_choice="required"), "r1")
    told: dict[int, str] = {}
    for at in range(0, len(TWO_CALLS), 7):
        piece, last = TWO_CALLS[at : at + 7], at + 7 >= len(TWO_CALLS)
        for call in reader.push(piece, last=last).get("tool_calls", []):
            told[call["index"]] = told.get(call["index"], "") + call["function"]["arguments"]
    assert told == {0: "{}", 1: "{}"}


def test_a_named_call_ends_like_text() -> None:
    reader = ToolReader(use_of(tool_choice=NAMED), "r1")
    message = whole_message(reader, '{"at": 1}')
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "time", "arguments": '{"at": 1}'}
    assert reader.finish_word is None


def test_an_answer_without_calls_is_text() -> None:
    reader = ToolReader(use_of(), "r1")
    assert whole_message(reader, "hello") == {"role": "assistant", "content": "hello"}
    assert reader.finish_word is None
    assert whole_message(ToolReader(use_of(), "r1"), "")["content"] == ""
