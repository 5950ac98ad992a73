"""Converts a generation to output items of the Responses API, and to the events of its stream.

Pure. Tests: tests/integration/test_gateway_responses.py.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.core.types import FinishReason, Usage
from services.gateway.api.responses_api import (
    RESPONSES_UNSUPPORTED,
    Body,
    NamedTool,
    ResponsesBody,
    as_chat,
)
from services.gateway.api.single_answer import Form, Generation
from services.gateway.api.token_scores import ScoresOfText
from services.gateway.errors import ErrorAnswer
from services.gateway.tools.pieces import Thought
from services.gateway.tools.scanner import CallArguments, CallStart


class ItemKind(enum.Enum):
    """The type of an output item; its id begins with the value."""

    REASONING = "rs"
    MESSAGE = "msg"
    CALL = "fc"


_TEXT_EVENTS = {
    ItemKind.REASONING: "response.reasoning_text",
    ItemKind.MESSAGE: "response.output_text",
    ItemKind.CALL: "response.function_call_arguments",
}


@dataclass(slots=True)
class Item:
    """One output item.

    Attributes:
        text: the thinking, the message's text, or the call's arguments.
        name, call_id: set for a call.
        status: in_progress, completed or incomplete.
        scores: log-probabilities of a message's tokens, if the client asked for them.
    """

    kind: ItemKind
    item_id: str
    text: str = ""
    name: str = ""
    call_id: str = ""
    status: str = "in_progress"
    scores: list[Body] = field(default_factory=list)

    def body(self) -> Body:
        """The item in its present state; without parts while it is empty."""
        head = {"id": self.item_id, "status": self.status}
        if self.kind is ItemKind.CALL:
            call = {"call_id": self.call_id, "name": self.name, "arguments": self.text}
            return {**head, "type": "function_call", **call}
        has_part = self.text or self.status != "in_progress"
        content = [self.part(self.text, self.scores)] if has_part else []
        if self.kind is ItemKind.REASONING:
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def part(self, text: str, scores: Sequence[Body] = ()) -> Body:
        """The single part of a reasoning item or a message."""
        if self.kind is ItemKind.REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(scores)}


class ResponseObject:
    """Makes the bodies and events of one response.

    See `Output`.
    """

    def __init__(self, body: ResponsesBody, generation: Generation) -> None:
        self._body = body
        self._generation = generation
        self._reader = generation.reader
        self._items: list[Item] = []
        self._sequence = 0
        self._scores = ScoresOfText()
        self._whole: Body = {}

    def opening(self, _usage: Usage) -> list[Body]:
        """See `Output`."""
        return [
            self._event("response.created", response=self._head("in_progress")),
            self._event("response.in_progress", response=self._head("in_progress")),
        ]

    def push(self, text: str, *, last: bool, scores: Sequence[Body] = ()) -> list[Body]:
        """See `Output`."""
        self._scores.add(scores)
        events: list[Body] = []
        for piece in self._reader.read(text, last=last):
            if isinstance(piece, CallStart):
                events += self._open(ItemKind.CALL, piece)
            elif isinstance(piece, CallArguments):
                events += self._write(ItemKind.CALL, piece.text)
            elif isinstance(piece, Thought):
                events += self._write(ItemKind.REASONING, piece.text)
            else:
                events += self._write(ItemKind.MESSAGE, piece.text)
        return events

    def closing(self, finish: FinishReason, usage: Usage, _stop: str) -> list[Body]:
        """See `Output`."""
        events = [] if self._items else self._open(ItemKind.MESSAGE)
        is_cut = finish is FinishReason.LENGTH
        events += self._close("incomplete" if is_cut else "completed")
        whole = self._head("incomplete" if is_cut else "completed")
        whole["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        whole["output"] = [item.body() for item in self._items]
        whole["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        self._whole = whole
        return [*events, self._event(f"response.{whole['status']}", response=whole)]

    def whole(self) -> Body:
        """See `Output`."""
        return self._whole

    def failed(self, answer: ErrorAnswer) -> list[Body]:
        """See `Output`."""
        error = answer.body["error"]
        code = error["code"] or "server_error"
        response = {**self._head("failed"), "error": {"code": code, "message": error["message"]}}
        plain = {"code": code, "message": error["message"], "param": error["param"]}
        return [self._event("error", **plain), self._event("response.failed", response=response)]

    # --- items ---

    def _write(self, kind: ItemKind, text: str) -> list[Body]:
        """Adds text to the open item, or opens a new item of this kind."""
        if not text:
            return []
        events = [] if self._items and self._items[-1].kind is kind else self._open(kind)
        item = self._items[-1]
        item.text += text
        scores = self._scores.take(text)
        if kind is ItemKind.MESSAGE:
            item.scores += scores
        return [*events, self._text_event("delta", item, scores, delta=text)]

    def _open(self, kind: ItemKind, call: CallStart | None = None) -> list[Body]:
        events = self._close("completed")
        number = len(self._items)
        item = Item(kind, f"{kind.value}_{self._generation.request_id}_{number}")
        if call is not None:
            item.name = call.name
            item.call_id = self._reader.call_id(call)
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=number, item=item.body())
        return [*events, added, *self._part_event("added", item)]

    def _close(self, status: str) -> list[Body]:
        if not self._items:
            return []
        item = self._items[-1]
        item.status = status
        told = "arguments" if item.kind is ItemKind.CALL else "text"
        more = {"name": item.name} if item.kind is ItemKind.CALL else {}
        return [
            self._text_event("done", item, item.scores, **{told: item.text}, **more),
            *self._part_event("done", item),
            self._event(
                "response.output_item.done", output_index=len(self._items) - 1, item=item.body()
            ),
        ]

    # --- events ---

    def _text_event(self, word: str, item: Item, scores: list[Body], **fields: Any) -> Body:
        place = self._place(item)
        if item.kind is ItemKind.MESSAGE:
            place["logprobs"] = list(scores)
        return self._event(f"{_TEXT_EVENTS[item.kind]}.{word}", **place, **fields)

    def _part_event(self, word: str, item: Item) -> list[Body]:
        if item.kind is ItemKind.CALL:  # a call's arguments are not a part
            return []
        part = item.part(item.text, item.scores)
        return [self._event(f"response.content_part.{word}", **self._place(item), part=part)]

    def _place(self, item: Item) -> Body:
        place: Body = {"item_id": item.item_id, "output_index": len(self._items) - 1}
        return place if item.kind is ItemKind.CALL else {**place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> Body:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _head(self, status: str) -> Body:
        body = self._body
        given = body.text.format if body.text is not None else None
        form = given.model_dump(by_alias=True, exclude_none=True) if given else {"type": "text"}
        choice = body.tool_choice or "auto"
        options = body.reasoning
        effort = {"effort": options.effort, "summary": options.summary} if options else None
        return {
            "id": f"resp_{self._generation.request_id}",
            "object": "response",
            "created_at": self._generation.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._generation.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": effort,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": form},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice,
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


RESPONSES = Form(
    ResponsesBody,
    RESPONSES_UNSUPPORTED,
    as_chat,
    ResponseObject,
    prompt_field="input",
    max_tokens_field="max_output_tokens",
)
