"""Bodies and chunks of the OpenAI API.

Pure. Tests: tests/unit/gateway/test_responses.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.core.types import FinishReason, TokenLogprobs, Usage
from services.gateway.openai import ApiCall, Endpoint

TokenBytes = Callable[[int], bytes]
"""The bytes that one token stands for."""

Body = dict[str, Any]


@dataclass(slots=True)
class ChoiceText:
    """All there is of one choice so far."""

    prompt_ids: Sequence[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


def usage_body(usages: Sequence[Usage]) -> Body:
    """Token counts of a call.

    Args:
        usages: of each choice, with prompt_tokens 0 where the prompt is another choice's too.
    """
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


class Responses:
    """Makes the bodies of one call.

    Args:
        call: what was asked.
        request_id: goes into `id`.
        model: served name.
        created: seconds since the epoch.
        token_bytes: for log-probabilities.
    """

    def __init__(
        self, call: ApiCall, request_id: str, model: str, created: int, token_bytes: TokenBytes
    ) -> None:
        self._call = call
        self._chat = call.endpoint is Endpoint.CHAT
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._head = {"id": f"{prefix}-{request_id}", "created": created, "model": model}
        self._token_bytes = token_bytes
        # Text before a piece, for `text_offset`.
        self._offsets: dict[int, int] = {}

    def whole(self, choices: Sequence[ChoiceText], usage: Body) -> Body:
        """The body of an answer that is not streamed."""
        body = {
            **self._head,
            "object": self._call.endpoint.value,
            "choices": [self._whole_choice(i, choice) for i, choice in enumerate(choices)],
            "usage": usage,
        }
        if self._chat and self._call.return_token_ids:
            body["prompt_token_ids"] = list(choices[0].prompt_ids)  # a chat has one prompt
        return body

    def opening(self, index: int, prompt_ids: Sequence[int]) -> Body | None:
        """The chunk that opens a choice: a chat's role, the prompt's ids if asked for."""
        ids = {"prompt_token_ids": list(prompt_ids)} if self._call.return_token_ids else {}
        if self._chat:
            delta = {"role": "assistant", "content": ""}
            return self._chunk({"index": index, "delta": delta, **_OPEN}, **ids)
        if ids:
            choice = {"index": index, "text": "", **_OPEN, **ids}
            return self._chunk(choice)
        return None

    def piece(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish_reason: FinishReason | None,
    ) -> Body | None:
        """The chunk for new text and tokens; None if there is nothing to say yet."""
        wants_tokens = self._call.return_token_ids or bool(logprobs)
        if not text and finish_reason is None and not (token_ids and wants_tokens):
            return None
        choice: Body = {
            "index": index,
            "logprobs": self._logprobs(index, token_ids, logprobs),
            "finish_reason": finish_reason.value if finish_reason else None,
        }
        if self._chat:
            choice["delta"] = {"content": text} if text else {}
        else:
            choice["text"] = text
        if self._call.return_token_ids:
            choice["token_ids"] = list(token_ids)
        return self._chunk(choice)

    def closing_usage(self, usage: Body) -> Body:
        """The last chunk: usage, no choices."""
        return {**self._chunk_head(), "choices": [], "usage": usage}

    def _chunk_head(self) -> Body:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else _TEXT}

    def _chunk(self, choice: Body, **more: Any) -> Body:
        body = {**self._chunk_head(), "choices": [choice], **more}
        if self._call.include_usage:
            body["usage"] = None  # as OpenAI's API has it on all chunks but the last
        return body

    def _whole_choice(self, index: int, choice: ChoiceText) -> Body:
        body: Body = {
            "index": index,
            "logprobs": self._logprobs(index, choice.token_ids, choice.logprobs),
            "finish_reason": choice.finish_reason.value if choice.finish_reason else None,
        }
        if self._chat:
            body["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            body["text"] = choice.text
        if self._call.return_token_ids:
            body["token_ids"] = list(choice.token_ids)
            if not self._chat:
                body["prompt_token_ids"] = list(choice.prompt_ids)
        return body

    # --- log-probabilities ---

    def _logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> Body | None:
        if self._call.sampling.num_logprobs < 0 or not logprobs:
            return None
        pairs = list(zip(token_ids, logprobs, strict=True))
        if self._chat:
            return {"content": [self._chat_entry(token, entry) for token, entry in pairs]}
        return self._completion_logprobs(index, pairs)

    def _chat_entry(self, token_id: int, entry: TokenLogprobs) -> Body:
        top = zip(entry.top_ids, entry.top_logprobs, strict=True)
        return {
            **self._token(token_id, entry.logprob),
            "top_logprobs": [self._token(top_id, logprob) for top_id, logprob in top],
        }

    def _token(self, token_id: int, logprob: float) -> Body:
        raw = self._token_bytes(token_id)
        text = raw.decode(errors="replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    def _completion_logprobs(self, index: int, pairs: Sequence[tuple[int, TokenLogprobs]]) -> Body:
        offset = self._offsets.get(index, 0)
        tokens: list[str] = []
        offsets: list[int] = []
        for token_id, _ in pairs:
            token = self._text(token_id)
            tokens.append(token)
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for _, entry in pairs],
            "top_logprobs": [self._top(entry) for _, entry in pairs],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> Mapping[str, float]:
        top = zip(entry.top_ids, entry.top_logprobs, strict=True)
        return {self._text(token_id): _finite(logprob) for token_id, logprob in top}

    def _text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode(errors="replace")


_OPEN: Body = {"logprobs": None, "finish_reason": None}
_TEXT = "text_completion"


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's API writes -9999 for a token that cannot come."""
    return max(logprob, -9999.0)
