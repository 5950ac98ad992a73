"""Functions that a model may call, and its calls, in the form for callers; pure.

Tests: tests/unit/client/test_tools.py, tests/integration/test_gateway_grpc.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, Required, TypedDict

from kvmesh.v1 import inference_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        description: describes the function to the model.
        parameters: JSON schema of its parameters; None if it has none.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model has made.

    Attributes:
        id: the message of role `tool` with the result repeats it as its `tool_call_id`.
        arguments: JSON, as the model wrote it.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a call.

    Attributes:
        index: number of the call in its generation.
        id, name: on the call's first part.
        arguments: more of the arguments' JSON.
    """

    index: int
    id: str
    name: str
    arguments: str


class Message(TypedDict, total=False):
    """One message of a chat.

    Keys:
        role: system, user, assistant or tool.
        tool_calls: calls that the assistant has made.
        tool_call_id: id of the call that a tool's message answers.
        reasoning: the assistant's thinking before its answer.
    """

    role: Required[str]
    content: Required[str]
    tool_calls: NotRequired[Sequence[ToolCall]]
    tool_call_id: NotRequired[str]
    reasoning: NotRequired[str]


class ToolOptions(TypedDict, total=False):
    """The tools of a chat.

    Keys:
        tools: functions that the model may call.
        tool_choice: auto, none, required, or the name of a function; default auto.
        parallel_tool_calls: more than one call is allowed; default true.
        template_arguments: further variables for the model's chat template.
    """

    tools: Sequence[Tool]
    tool_choice: str
    parallel_tool_calls: bool
    template_arguments: Mapping[str, Any]


_CHOICES = {
    "auto": pb.TOOL_CHOICE_UNSPECIFIED,
    "none": pb.TOOL_CHOICE_NONE,
    "required": pb.TOOL_CHOICE_REQUIRED,
}


def message_to_proto(message: Mapping[str, Any]) -> pb.ChatMessage:
    """Converts one message of a chat.

    Raises:
        KeyError, TypeError: a field is missing or of another type.
    """
    return pb.ChatMessage(
        role=message["role"],
        content=message["content"],
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments)
            for call in message.get("tool_calls", ())
        ],
        tool_call_id=message.get("tool_call_id", ""),
        reasoning=message.get("reasoning", ""),
    )


def set_tools(chat: pb.ChatPrompt, options: Mapping[str, Any]) -> None:
    """Adds the tools to a chat.

    Raises:
        TypeError: a value is of another type, or not valid JSON.
    """
    for tool in options.get("tools", ()):
        parameters = "" if tool.parameters is None else json.dumps(tool.parameters)
        chat.tools.add(name=tool.name, description=tool.description, parameters_json=parameters)
    choice = options.get("tool_choice", "auto")
    if choice in _CHOICES:
        chat.tool_choice = _CHOICES[choice]
    else:
        chat.chosen_tool = choice
    chat.single_call = not options.get("parallel_tool_calls", True)
    if "template_arguments" in options:
        chat.template_arguments_json = json.dumps(options["template_arguments"])


def call_deltas(message: pb.GenerateResponse) -> tuple[ToolCallDelta, ...]:
    """The parts of calls in a message."""
    return tuple(
        ToolCallDelta(part.index, part.id, part.name, part.arguments_json)
        for part in message.tool_calls
    )


def joined_calls(parts: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Joins the parts of calls, in order."""
    calls: dict[int, ToolCall] = {}
    for part in parts:
        known = calls.get(part.index, ToolCall("", "", ""))
        calls[part.index] = ToolCall(
            known.id or part.id, known.name or part.name, known.arguments + part.arguments
        )
    return tuple(calls[index] for index in sorted(calls))
