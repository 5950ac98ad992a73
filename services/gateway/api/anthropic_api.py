"""Converts bodies of Anthropic's Messages API to chats: text, thinking, calls and their results.

Pure. Tests: tests/integration/test_gateway_messages.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from kvmesh.core.errors import InvalidRequestError
from services.gateway.api.messages import MAX_MESSAGES, FewParts, Message
from services.gateway.api.responses_input import (
    FunctionCallOutput,
    InputItem,
    InputMessage,
    InputText,
    PastFunctionCall,
    PastReasoning,
    ReasoningText,
    messages_of,
)
from services.gateway.api.schema import MAX_TOOLS, ChatBody
from services.gateway.api.structured import JsonSchema, JsonSchemaFormat, ResponseFormat


class _Part(BaseModel):
    """Base of all models. It ignores `cache_control`, since prefixes are always cached."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)


class TextBlock(_Part):
    """A part with text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(_Part):
    """The model's thinking in an earlier turn."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(_Part):
    """The model's tool call in an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Part):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None


Block: TypeAlias = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class Turn(_Part):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    def items(self) -> list[InputItem]:
        """Its content as items in order; consecutive texts are joined."""
        if isinstance(self.content, str):
            return [InputMessage(role=self.role, content=self.content)]
        found: list[InputItem] = []
        for block in self.content:
            last = found[-1] if found else None
            if isinstance(block, TextBlock):
                part = InputText(type="text", text=block.text)
                if isinstance(last, InputMessage) and isinstance(last.content, list):
                    last.content.append(part)
                else:
                    found.append(InputMessage(role=self.role, content=[part]))
            else:
                found.append(_item(block))
        return found


def _item(block: ThinkingBlock | ToolUseBlock | ToolResultBlock) -> InputItem:
    if isinstance(block, ThinkingBlock):
        part = ReasoningText(type="reasoning_text", text=block.thinking)
        return PastReasoning(type="reasoning", content=[part])
    if isinstance(block, ToolUseBlock):
        arguments = json.dumps(block.input, ensure_ascii=False)
        return PastFunctionCall(
            type="function_call", call_id=block.id, name=block.name, arguments=arguments
        )
    return FunctionCallOutput(
        type="function_call_output", call_id=block.tool_use_id, output=_text(block.content)
    )


def _text(content: str | list[TextBlock] | None) -> str:
    if isinstance(content, list):
        return "".join(block.text for block in content)
    return content or ""


class ClientTool(_Part):
    """A tool that the caller runs. Tools that Anthropic runs are not supported."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: JsonSchema

    def for_chat(self) -> dict[str, Any]:
        """The tool in the format of chat completions."""
        function = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


class AnyChoice(_Part):
    """`tool_choice` without a name."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class ToolChoice(_Part):
    """`tool_choice` for one tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


def _choice_kind(choice: Any) -> str:
    kind = choice.get("type") if isinstance(choice, Mapping) else getattr(choice, "type", None)
    return "tool" if kind == "tool" else "other"


_Choice: TypeAlias = Annotated[
    Annotated[ToolChoice, Tag("tool")] | Annotated[AnyChoice, Tag("other")],
    Discriminator(_choice_kind),
]


class Thinking(_Part):
    """`thinking`: whether the model should think; the model decides for how long."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(_Part):
    """`output_config.format`."""

    type: Literal["json_schema"]
    json_schema: JsonSchema = Field(alias="schema")


class OutputConfig(_Part):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(_Part):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[Turn], FewParts, Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: list[ClientTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: _Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def shows_thinking(self) -> bool:
        """Whether the model's thinking is part of the answer."""
        return self.thinking is None or self.thinking.type != "disabled"


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, lt=2**32)
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    stream: bool | None = None


MESSAGES_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
}

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(body: MessagesBody) -> ChatBody:
    """Converts the body to a chat completion's.

    Raises:
        InvalidRequestError: it ends with a part of the answer.
    """
    same = ("temperature", "top_p", "top_k", "stream")
    return _chat(
        body,
        {
            **{name: getattr(body, name) for name in same},
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
        },
    )


def as_counted_chat(body: CountBody) -> ChatBody:
    """Converts the body to the chat whose prompt tokens are counted.

    Raises:
        InvalidRequestError: it ends with a part of the answer.
    """
    return _chat(body, {})


def _chat(body: CountBody, more: Mapping[str, Any]) -> ChatBody:
    if body.messages[-1].role == "assistant":
        raise InvalidRequestError(
            "messages: the last message is the assistant's, and a started answer cannot be "
            "continued: end with a message of the user",
            "messages",
        )
    messages = [Message(role="system", content=_text(body.system))] if body.system else []
    messages += messages_of(item for turn in body.messages for item in turn.items())
    choice, config = body.tool_choice, body.output_config
    parallel = choice is None or not choice.disable_parallel_tool_use
    return ChatBody.model_validate(
        {
            **more,
            "model": body.model,
            "messages": messages,
            "tools": [tool.for_chat() for tool in body.tools] if body.tools else None,
            "tool_choice": _named(choice),
            "parallel_tool_calls": parallel,
            "reasoning_effort": _effort(body),
            "include_reasoning": body.shows_thinking,
            "response_format": _format(config.format if config is not None else None),
        }
    )


def _named(choice: ToolChoice | AnyChoice | None) -> Any:
    if isinstance(choice, ToolChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return None if choice is None else _CHOICES[choice.type]


def _effort(body: CountBody) -> str | None:
    if body.thinking is not None and body.thinking.type == "disabled":
        return "none"
    effort = body.output_config.effort if body.output_config is not None else None
    return "xhigh" if effort == "max" else effort


def _format(given: OutputFormat | None) -> ResponseFormat | None:
    if given is None:
        return None
    schema = JsonSchemaFormat(name="answer", schema=given.json_schema, strict=True)
    return ResponseFormat(type="json_schema", json_schema=schema)
