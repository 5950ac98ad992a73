"""Converts a generation to Anthropic's content blocks, and to the events of a message's stream.

Pure. Tests: tests/integration/test_gateway_messages.py,
tests/unit/gateway/api/test_anthropic_output.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.core.types import FinishReason, Usage
from services.gateway.api.anthropic_api import MESSAGES_UNSUPPORTED, MessagesBody, as_chat
from services.gateway.api.json_input import json_value
from services.gateway.api.responses import Body
from services.gateway.api.single_answer import Form, Generation
from services.gateway.errors import ErrorAnswer, anthropic_body
from services.gateway.tools.pieces import AnyPiece, Thought
from services.gateway.tools.scanner import CallArguments, CallStart

_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""For each type of block: the type of its deltas, and the field that holds their text."""


@dataclass(slots=True)
class _Block:
    """One content block.

    Attributes:
        texts: the texts of its deltas.
        call: id and name, if the block is a call.
    """

    type: str
    texts: list[str] = field(default_factory=list)
    call: Body = field(default_factory=dict)

    def body(self) -> Body:
        text = "".join(self.texts)
        if self.type == "tool_use":
            return {"type": self.type, **self.call, "input": _object(text)}
        if self.type == "thinking":
            # The signature is empty: clients may return thinking unsigned.
            return {"type": self.type, "thinking": text, "signature": ""}
        return {"type": self.type, "text": text}


class MessageObject:
    """Makes the body and the events of one message. See `Output`."""

    def __init__(self, body: MessagesBody, generation: Generation) -> None:
        self._shows_thinking = body.shows_thinking
        self._generation = generation
        self._blocks: list[_Block] = []
        self._whole: Body = {}

    def opening(self, usage: Usage) -> list[Body]:
        """See `Output`."""
        message = self._message([], _usage_body(usage), None, None)
        return [{"type": "message_start", "message": message}]

    def push(self, text: str, *, last: bool, scores: Sequence[Body] = ()) -> list[Body]:
        """See `Output`. The API has no log-probabilities."""
        events: list[Body] = []
        for piece in self._generation.reader.read(text, last=last):
            events += self._piece(piece)
        return events

    def _piece(self, piece: AnyPiece) -> list[Body]:
        if isinstance(piece, CallStart):
            call = {"id": self._generation.reader.call_id(piece), "name": piece.name}
            return self._open("tool_use", call)
        if isinstance(piece, CallArguments):
            return self._write("tool_use", piece.text)
        if not isinstance(piece, Thought):
            return self._write("text", piece.text)
        return self._write("thinking", piece.text) if self._shows_thinking else []

    def closing(self, finish: FinishReason, usage: Usage, stop: str) -> list[Body]:
        """See `Output`."""
        reason = "max_tokens" if finish is FinishReason.LENGTH else "end_turn"
        if stop:
            reason = "stop_sequence"
        elif finish is FinishReason.STOP and any(each.call for each in self._blocks):
            reason = "tool_use"
        counts = _usage_body(usage)
        blocks = [each.body() for each in self._blocks]
        self._whole = self._message(blocks, counts, reason, stop or None)
        delta = {"stop_reason": reason, "stop_sequence": stop or None}
        return [
            *self._close(),
            {"type": "message_delta", "delta": delta, "usage": counts},
            {"type": "message_stop"},
        ]

    def whole(self) -> Body:
        """See `Output`."""
        return self._whole

    def failed(self, answer: ErrorAnswer) -> list[Body]:
        """See `Output`."""
        return [anthropic_body(answer, self._generation.request_id)]

    # --- blocks ---

    def _write(self, kind: str, text: str) -> list[Body]:
        """Adds text to the open block, or opens a new block of this kind."""
        is_open = bool(self._blocks) and self._blocks[-1].type == kind
        events = [] if is_open else self._open(kind)
        self._blocks[-1].texts.append(text)
        delta, name = _DELTAS[kind]
        return [*events, self._event("delta", delta={"type": delta, name: text})]

    def _open(self, kind: str, call: Body | None = None) -> list[Body]:
        events = self._close()
        block = _Block(kind, call=call or {})
        self._blocks.append(block)
        return [*events, self._event("start", content_block=block.body())]

    def _close(self) -> list[Body]:
        return [self._event("stop")] if self._blocks else []

    def _event(self, word: str, **fields: Any) -> Body:
        return {"type": f"content_block_{word}", "index": len(self._blocks) - 1, **fields}

    def _message(
        self, blocks: list[Body], usage: Body, reason: str | None, stop: str | None
    ) -> Body:
        return {
            "id": f"msg_{self._generation.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def _usage_body(usage: Usage) -> Body:
    return {
        # Anthropic counts cached tokens separately.
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _object(text: str) -> Body:
    """The input of a call; empty if its text cannot be read, as when `max_tokens` cut it."""
    try:
        value = json_value(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


MESSAGES = Form(
    MessagesBody,
    MESSAGES_UNSUPPORTED,
    as_chat,
    MessageObject,
    prompt_field="messages",
    max_tokens_field="max_tokens",
)
