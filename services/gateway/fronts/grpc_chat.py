"""Chats of the public gRPC API: reads messages and tools, writes tool calls.

Pure. Tests: tests/integration/test_gateway_grpc.py.
"""

from __future__ import annotations

from typing import Any

from kvmesh.core.errors import InvalidRequestError
from kvmesh.v1 import inference_service_pb2 as pb
from services.gateway.api.json_input import json_value
from services.gateway.api.schema import ChatBody, parse_body
from services.gateway.tools.scanner import CallArguments, CallStart, Content
from services.gateway.tools.tools import ToolReader

_CHOICES = {pb.TOOL_CHOICE_NONE: "none", pb.TOOL_CHOICE_REQUIRED: "required"}


def chat_body(request: pb.GenerateRequest) -> ChatBody:
    """Converts a request's chat to the HTTP API's body, with the same checks.

    Raises:
        InvalidRequestError: names the field and what is allowed.
    """
    chat = request.chat
    choice: Any = _CHOICES.get(chat.tool_choice)
    if chat.chosen_tool:
        choice = {"type": "function", "function": {"name": chat.chosen_tool}}
    arguments = _json(chat.template_arguments_json, "template_arguments_json")
    if request.HasField("include_reasoning"):
        include: bool | None = request.include_reasoning
    else:
        include = None
    content = {
        "messages": [_message(message) for message in chat.messages],
        "tools": [_tool(tool, number) for number, tool in enumerate(chat.tools)] or None,
        "tool_choice": choice,
        "parallel_tool_calls": not chat.single_call,
        "include_reasoning": include,
        "chat_template_kwargs": arguments,
    }
    return parse_body(ChatBody, content, {})


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    return found


def _tool(tool: pb.Tool, number: int) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or None,
        "parameters": _json(tool.parameters_json, f"tools[{number}].parameters_json"),
    }
    return {"type": "function", "function": function}


def _json(text: str, field: str) -> dict[str, Any] | None:
    """Parses a JSON object; None for an empty text."""
    if not text:
        return None
    try:
        found = json_value(text)
    except ValueError as error:
        raise InvalidRequestError(f"{field}: not JSON: {error}", field) from error
    if not isinstance(found, dict):
        raise InvalidRequestError(f"{field}: must be an object", field)
    return found


class CallDeltas:
    """Finds the tool calls in one generation's text."""

    def __init__(self, reader: ToolReader) -> None:
        self._reader = reader
        self._num_calls = 0

    def push(self, text: str, *, last: bool) -> tuple[str, list[pb.ToolCallDelta]]:
        """Adds text; returns the text outside of calls, and the parts of calls.

        Args:
            last: this is the end of the text.
        """
        content = ""
        parts: list[pb.ToolCallDelta] = []
        for piece in self._reader.read(text, last=last):
            if isinstance(piece, Content):
                content += piece.text
            elif isinstance(piece, CallStart):
                call_id = piece.call_id or self._reader.call_id(self._num_calls)
                parts.append(pb.ToolCallDelta(index=self._num_calls, id=call_id, name=piece.name))
                self._num_calls += 1
            else:
                assert isinstance(piece, CallArguments)
                index = self._num_calls - 1
                parts.append(pb.ToolCallDelta(index=index, arguments_json=piece.text))
        return content, parts
