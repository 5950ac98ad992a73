"""Input items of the Responses API, and their conversion to a chat.

Pure. Tests: tests/integration/test_gateway_responses.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator

from services.gateway.api.json_input import json_value
from services.gateway.api.messages import Message, PastCall


class InputText(BaseModel):
    """A part of an input message."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(BaseModel):
    """A message with a role."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText]


class ReasoningText(BaseModel):
    """A part of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class PastReasoning(BaseModel):
    """A reasoning item of an earlier turn."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


class PastFunctionCall(BaseModel):
    """A function call of an earlier turn."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_json(cls, arguments: str) -> str:
        json_value(arguments or "{}")
        return arguments

    def for_chat(self) -> PastCall:
        """The call in the format of a chat's message."""
        function = {"name": self.name, "arguments": self.arguments}
        return PastCall.model_validate(
            {"id": self.call_id, "type": "function", "function": function}
        )


class FunctionCallOutput(BaseModel):
    """The output of a function call."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, Mapping) else getattr(item, "type", None)
    return "message" if kind is None else str(kind)


InputItem: TypeAlias = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[PastReasoning, Tag("reasoning")]
    | Annotated[PastFunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Field(discriminator=Discriminator(_kind)),
]
"""One item of the input; a message may omit its type."""


def messages_of(items: Iterable[InputItem]) -> list[Message]:
    """The items as a chat's messages; one turn's thinking, text and calls become one message."""
    chat = _Chat()
    for item in items:
        chat.add(item)
    return chat.messages


class _Chat:
    """Collects messages, and the parts of the assistant's current turn."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None
        self._names: dict[str, str] = {}

    def add(self, item: InputItem) -> None:
        if isinstance(item, FunctionCallOutput):
            more = {"tool_call_id": item.call_id}
            if item.call_id in self._names:  # some chat templates need the name
                more["name"] = self._names[item.call_id]
            self._turn = None
            self._say("tool", _text(item.output), **more)
        elif isinstance(item, InputMessage) and item.role != "assistant":
            self._turn = None
            # Chat templates use the older name.
            self._say("system" if item.role == "developer" else item.role, _text(item.content))
        else:
            self._add_to_turn(item)

    def _add_to_turn(self, item: InputMessage | PastReasoning | PastFunctionCall) -> None:
        turn = self._turn
        if isinstance(item, PastReasoning):
            thought = "".join(part.text for part in item.content or ())
            self._turn = self._say("assistant", "", reasoning_content=thought)
        elif isinstance(item, InputMessage):
            if turn is None or turn.content or turn.tool_calls:
                turn = self._turn = self._say("assistant", "")
            turn.content = _text(item.content)
        else:
            if turn is None:
                turn = self._turn = self._say("assistant", "")
            if turn.tool_calls is None:
                turn.tool_calls = []
            turn.tool_calls.append(item.for_chat())
            self._names[item.call_id] = item.name

    def _say(self, role: str, content: str, **more: str) -> Message:
        message = Message.model_validate({"role": role, "content": content, **more})
        self.messages.append(message)
        return message


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
