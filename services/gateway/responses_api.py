"""OpenAI's Responses API, text in and text out: bodies to calls, generations to answers and events.

Nothing is stored: every call carries its whole input. Pure.
Tests: tests/unit/gateway/test_responses_api.py.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from kvmesh.core.types import FinishReason, Usage
from services.gateway.messages import Message
from services.gateway.schema import ChatBody
from services.gateway.structured import JsonSchema, JsonSchemaFormat, ResponseFormat

Body: TypeAlias = dict[str, Any]


class InputText(BaseModel):
    """A part of an input message."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(BaseModel):
    """One item of the input."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText]

    def as_message(self) -> Message:
        """The item as a chat message."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        # Chat templates know the older word.
        role = "system" if self.role == "developer" else self.role
        return Message(role=role, content=content)


class TextFormat(BaseModel):
    """`text.format`."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    json_schema: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(BaseModel):
    """`text`."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    format: TextFormat | None = None


class ResponsesBody(BaseModel):
    """POST /v1/responses."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    model: str | None = None
    input: str | list[InputMessage] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**32)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    text: TextOptions | None = None
    stream: bool | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    ignore_eos: bool | None = None
    metadata: dict[str, str] | None = None
    cache_salt: str | None = Field(None, max_length=256)
    request_id: str | None = None


RESPONSES_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({}, {"effort": "none"}),
    "stream_options": ({},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields that would change the answer, and their values that do not."""


def as_chat(body: ResponsesBody) -> ChatBody:
    """The same request as a chat."""
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    else:
        messages += [item.as_message() for item in body.input]
    same = ("model", "temperature", "top_p", "seed", "ignore_eos", "stream", "cache_salt")
    return ChatBody.model_validate(
        {
            **{name: getattr(body, name) for name in same},
            "messages": messages,
            "max_completion_tokens": body.max_output_tokens,
            "response_format": _response_format(body.text),
            "request_id": body.request_id,
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


class ResponseObject:
    """Makes the bodies and events of one response.

    Args:
        created: seconds since the epoch.
    """

    def __init__(self, body: ResponsesBody, request_id: str, model: str, created: int) -> None:
        self._body = body
        self._model = model
        self._created = created
        self._id = f"resp_{request_id}"
        self._item = f"msg_{request_id}"
        self._sequence = 0

    def whole(self, text: str, finish: FinishReason | None, usage: Usage) -> Body:
        """The response when it is complete."""
        cut = finish is FinishReason.LENGTH
        body = self._head("incomplete" if cut else "completed")
        body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        body["output"] = [self._message(text, finish)]
        body["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return body

    def opening(self) -> list[Body]:
        """Events before the first text."""
        item = {**self._message("", None), "content": []}
        return [
            self._event("response.created", response=self._head("in_progress")),
            self._event("response.in_progress", response=self._head("in_progress")),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._part(), part=_text_part("")),
        ]

    def delta(self, text: str) -> Body:
        """The event for more text."""
        return self._event("response.output_text.delta", **self._part(), delta=text, logprobs=[])

    def closing(self, text: str, finish: FinishReason | None, usage: Usage) -> list[Body]:
        """Events after the last text."""
        whole = self.whole(text, finish, usage)
        last = f"response.{whole['status']}"
        item = self._message(text, finish)
        return [
            self._event("response.output_text.done", **self._part(), text=text, logprobs=[]),
            self._event("response.content_part.done", **self._part(), part=_text_part(text)),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(last, response=whole),
        ]

    def failed(self, error: Body) -> list[Body]:
        """Events of a stream that an error ends.

        Args:
            error: `error` of OpenAI's error body.
        """
        code = error["code"] or "server_error"
        response = {**self._head("failed"), "error": {"code": code, "message": error["message"]}}
        plain = {"code": code, "message": error["message"], "param": error["param"]}
        return [self._event("error", **plain), self._event("response.failed", response=response)]

    def _event(self, kind: str, **fields: Any) -> Body:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _part(self) -> Body:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _message(self, text: str, finish: FinishReason | None) -> Body:
        status = "in_progress" if finish is None else "completed"
        if finish is FinishReason.LENGTH:
            status = "incomplete"
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_text_part(text)],
        }

    def _head(self, status: str) -> Body:
        body = self._body
        given = body.text.format if body.text is not None else None
        form = given.model_dump(by_alias=True, exclude_none=True) if given else {"type": "text"}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": form},
            "tool_choice": "auto",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _text_part(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
