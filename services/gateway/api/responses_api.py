"""Converts bodies of OpenAI's Responses API to chats: text, function calls and their results.

Responses are not stored, so every call carries its whole input. Pure.
Tests: tests/integration/test_gateway_responses.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from kvmesh.core.errors import InvalidRequestError
from services.gateway.api.messages import MAX_MESSAGES, FewParts, FunctionName, Message
from services.gateway.api.responses_input import InputItem, messages_of
from services.gateway.api.schema import MAX_TOOLS, MAX_TOP_LOGPROBS, ChatBody, Effort
from services.gateway.api.structured import JsonSchema, JsonSchemaFormat, ResponseFormat

Body: TypeAlias = dict[str, Any]


class TextFormat(BaseModel):
    """`text.format`."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str = Field("", max_length=256)
    json_schema: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(BaseModel):
    """`text`."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    format: TextFormat | None = None


class FunctionTool(BaseModel):
    """A function that the model may call. Further fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None

    def for_chat(self) -> Body:
        """The tool in the format of chat completions."""
        return {"type": self.type, "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class NamedTool(FunctionName):
    """`tool_choice` for one function."""

    type: Literal["function"]


class ReasoningOptions(BaseModel):
    """`reasoning`. There are no summaries: the answer contains the thinking itself."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


SCORES = "message.output_text.logprobs"

Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
"""Values of `include`. Reasoning is never encrypted; it is sent and accepted as plain text."""


Items = Annotated[list[InputItem], FewParts, Field(max_length=MAX_MESSAGES)]


class ResponsesBody(BaseModel):
    """POST /v1/responses."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    model: str | None = None
    input: str | Items = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**32)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Included] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    stream: bool | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    ignore_eos: bool | None = None
    metadata: dict[str, str] | None = None
    cache_salt: str | None = Field(None, max_length=256)
    request_id: str | None = None

    @property
    def wants_scores(self) -> bool:
        """Whether the client asked for the log-probabilities of the message's tokens."""
        return SCORES in (self.include or ())


RESPONSES_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "store": (False,),
    # The usage is in the last event of every stream.
    "stream_options": ({}, {"include_obfuscation": False}, {"include_usage": True}),
    "truncation": ("disabled",),
}
"""Fields that are not supported, each with the values that have no effect."""


def as_chat(body: ResponsesBody) -> ChatBody:
    """Converts the request to a chat.

    Raises:
        InvalidRequestError: it asks for log-probabilities that `include` does not put into the
            answer.
    """
    if body.top_logprobs and not body.wants_scores:
        raise InvalidRequestError(f"top_logprobs needs include to have {SCORES!r}", "top_logprobs")
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    else:
        messages += messages_of(body.input)
    same = ("model", "temperature", "top_p", "seed", "ignore_eos", "stream", "cache_salt")
    choice = body.tool_choice
    named = {"type": "function", "function": choice} if isinstance(choice, NamedTool) else choice
    return ChatBody.model_validate(
        {
            **{name: getattr(body, name) for name in same},
            "messages": messages,
            "logprobs": body.wants_scores,
            "top_logprobs": body.top_logprobs if body.wants_scores else None,
            "max_completion_tokens": body.max_output_tokens,
            "response_format": _response_format(body.text),
            "request_id": body.request_id,
            "tools": [tool.for_chat() for tool in body.tools] if body.tools else None,
            "tool_choice": named,
            "parallel_tool_calls": body.parallel_tool_calls,
            "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
        }
    )


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    given = text.format if text is not None else None
    if given is None:
        return None
    schema = None
    if given.json_schema is not None:
        schema = JsonSchemaFormat(name=given.name, schema=given.json_schema, strict=given.strict)
    return ResponseFormat(type=given.type, json_schema=schema)
