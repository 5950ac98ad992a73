"""Messages and tools of a chat, as pydantic models.

Pure. Tests: tests/unit/gateway/api/test_openai.py, test_messages.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvmesh.core.errors import InvalidRequestError
from services.gateway.api.json_input import json_value

MAX_MESSAGES = 10_000
"""Maximum number of messages of a chat, and of all their parts and calls together.

The event loop validates them, so more would stall it.
"""

_LISTS = ("content", "tool_calls", "output")
"""Fields of a message that hold lists of parts or calls."""


class TextPart(BaseModel):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class PastFunction(BaseModel):
    """The function of a call in an earlier turn."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class Arguments(dict[str, Any]):
    """Arguments of a call for chat templates: an object whose text is its JSON.

    Most templates iterate over the object, some print it, and some concatenate it with a text.

    Args:
        text: the JSON as the model wrote it.
    """

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, text: str) -> str:
        return self._text + text

    def __radd__(self, text: str) -> str:
        return text + self._text


class PastCall(BaseModel):
    """A call in an assistant's message."""

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    function: PastFunction

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it, with the arguments as an object."""
        given = self.function.arguments
        text = (given or "{}") if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        try:
            arguments = json_value(text)
        except ValueError as error:
            raise InvalidRequestError(
                f"messages: arguments of {self.function.name} are not JSON: {error}", "messages"
            ) from error
        if isinstance(arguments, dict):
            arguments = Arguments(arguments, text)
        function = {"name": self.function.name, "arguments": arguments}
        return {"type": "function", **(self.model_extra or {}), "function": function}


class Message(BaseModel):
    """One message of a chat. Further fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    role: str = Field(min_length=1)
    content: str | list[TextPart] | None = None
    tool_calls: list[PastCall] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it, with the content as one string."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        more = dict(self.model_extra or {})
        if more.get("reasoning") and not more.get("reasoning_content"):
            # vLLM's newer name; chat templates use DeepSeek's.
            more["reasoning_content"] = more["reasoning"]
        if self.tool_calls:
            more["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return {**more, "role": self.role, "content": content or ""}


def _few_parts(messages: Any) -> Any:
    """Refuses too many parts before any of them is validated."""
    if isinstance(messages, list):
        named = [each for each in messages if isinstance(each, Mapping)]
        lists = [each.get(name) for each in named for name in _LISTS]
        if sum(len(each) for each in lists if isinstance(each, list)) > MAX_MESSAGES:
            raise ValueError(f"at most {MAX_MESSAGES} parts and calls of all messages are allowed")
    return messages


FewParts = BeforeValidator(_few_parts)
"""Limits the number of parts and calls in a list of messages."""

Messages = Annotated[list[Message], FewParts, Field(min_length=1, max_length=MAX_MESSAGES)]


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool. Functions are the only kind."""

    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    """Names a function."""

    name: str


class NamedChoice(BaseModel):
    """`tool_choice` for one function."""

    type: Literal["function"]
    function: FunctionName
