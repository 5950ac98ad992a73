"""Bodies and chunks of the OpenAI API.

Pure. Tests: tests/unit/gateway/api/test_responses.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.core.types import FINISH_WORDS, FinishReason, TokenLogprobs, Usage
from services.gateway.api.openai import ApiCall, Endpoint
from services.gateway.api.token_scores import LOWEST, TokenBytes, chosen_score, id_name
from services.gateway.tools.reasoning import Thinking, Thoughts
from services.gateway.tools.tools import ToolReader, whole_message

Body = dict[str, Any]


@dataclass(slots=True)
class ChoiceText:
    """The output of one choice so far.

    Attributes:
        echo: the prompt's text, if the answer begins with it.
        prompt_logprobs: of all prompt tokens but the first, if the client asked for them.
    """

    prompt_ids: Sequence[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    echo: str = ""


def usage_body(usages: Sequence[Usage], *, has_reasoning: bool = False) -> Body:
    """Token counts of a call.

    Args:
        usages: of each choice; prompt_tokens is 0 if an earlier choice has the same prompt.
        has_reasoning: the model may think, so the thinking's tokens are counted.
    """
    details: Body = {}
    if has_reasoning:
        reasoning = sum([usage.reasoning_tokens for usage in usages])
        details["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    prompt = sum([usage.prompt_tokens for usage in usages])
    completion = sum([usage.completion_tokens for usage in usages])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum([usage.cached_tokens for usage in usages])},
        **details,
    }


class Responses:
    """Makes the bodies of one call.

    Args:
        call: the checked call.
        request_id: for the bodies' `id`.
        model: served name.
        created: seconds since the epoch.
        token_bytes: for log-probabilities.
        thinking: how the choices' text begins; None if it is not searched for thinking.
    """

    def __init__(
        self,
        call: ApiCall,
        request_id: str,
        model: str,
        created: int,
        token_bytes: TokenBytes,
        thinking: Thinking | None = None,
    ) -> None:
        self._call = call
        self._chat = call.endpoint is Endpoint.CHAT
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._head = {"id": f"{prefix}-{request_id}", "created": created, "model": model}
        self._token_bytes = token_bytes
        # Number of characters before the next piece, for `text_offset`.
        self._offsets: dict[int, int] = {}
        self._tools: dict[int, ToolReader] = {}
        self._thoughts = Thoughts(thinking) if thinking is not None else None

    def whole(self, choices: Sequence[ChoiceText], usage: Body) -> Body:
        """The body of an answer that is not streamed."""
        body = {
            **self._head,
            "object": "chat.completion" if self._chat else _TEXT,
            "choices": [self._whole_choice(i, choice) for i, choice in enumerate(choices)],
            "usage": usage,
        }
        if self._chat and self._call.return_token_ids:
            body["prompt_token_ids"] = list(choices[0].prompt_ids)  # a chat has one prompt
        if self._chat and self._call.return_prompt_logprobs:
            body["prompt_logprobs"] = self._prompt_scores(choices[0])
        return body

    def opening(self, index: int, choice: ChoiceText) -> Body | None:
        """A choice's first chunk: a chat's role, or the echoed prompt; prompt ids on request."""
        ids = {"prompt_token_ids": list(choice.prompt_ids)} if self._call.return_token_ids else {}
        if self._chat:
            delta = {"role": "assistant", "content": ""}
            return self._chunk({"index": index, "delta": delta, **_OPEN}, **ids)
        if ids or self._call.echo:
            logprobs = self._echoed(index, choice)
            return self._chunk(
                {"index": index, "text": choice.echo, **_OPEN, "logprobs": logprobs, **ids}
            )
        return None

    def piece(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish_reason: FinishReason | None,
    ) -> Body | None:
        """The chunk for new text and tokens; None if it would be empty."""
        thought = ""
        if self._thoughts is not None:
            thought, text = self._thoughts.told(index, text, last=finish_reason is not None)
        delta: Body = {"content": text} if text else {}
        if self._call.tools is not None:
            delta = self._reader(index).push(text, last=finish_reason is not None)
        if thought and self._call.include_reasoning:
            delta |= _thought(thought)
        wants_tokens = self._call.return_token_ids or bool(logprobs)
        nothing = not delta and finish_reason is None
        if nothing and not (token_ids and (wants_tokens or self._call.continuous_usage)):
            return None
        choice: Body = {
            "index": index,
            "logprobs": self._logprobs(index, token_ids, logprobs),
            "finish_reason": self._finish_word(index, finish_reason),
        }
        if self._chat:
            choice["delta"] = delta
        else:
            choice["text"] = text
        if self._call.return_token_ids:
            choice["token_ids"] = list(token_ids)
        return self._chunk(choice)

    def is_answer(self, index: int) -> bool:
        """Whether all further text of a choice is content: its thinking is over."""
        return self._thoughts is None or self._thoughts.is_answer(index)

    def _reader(self, index: int) -> ToolReader:
        """The reader of a choice's tool calls."""
        if index not in self._tools:
            assert self._call.tools is not None
            self._tools[index] = ToolReader(self._call.tools, f"{self._head['id']}/{index}")
        return self._tools[index]

    def _finish_word(self, index: int, reason: FinishReason | None) -> str | None:
        if reason is FinishReason.STOP and index in self._tools:
            return self._tools[index].finish_word or FINISH_WORDS[reason]
        return None if reason is None else FINISH_WORDS[reason]

    def closing_usage(self, usage: Body) -> Body:
        """The last chunk: usage, no choices."""
        return {**self._chunk_head(), "choices": [], "usage": usage}

    def _chunk_head(self) -> Body:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else _TEXT}

    def _chunk(self, choice: Body, **more: Any) -> Body:
        body = {**self._chunk_head(), "choices": [choice], **more}
        if self._call.include_usage:
            body["usage"] = None  # OpenAI's API has null on all chunks but the last
        return body

    def _whole_choice(self, index: int, choice: ChoiceText) -> Body:
        thought, text = "", choice.text
        if self._thoughts is not None:
            thought, text = self._thoughts.told(index, text, last=True)
        message: Body = {"role": "assistant", "content": text}
        if self._call.tools is not None:
            message = whole_message(self._reader(index), text)
        if self._thoughts is not None and self._call.include_reasoning:
            message |= _thought(thought or None)
        logprobs: Body | None = None
        if self._call.sampling.num_logprobs >= 0:
            echoed = self._echoed(index, choice)
            scores = self._logprobs(index, choice.token_ids, choice.logprobs)
            logprobs = joined_logprobs(echoed, scores)
        body: Body = {
            "index": index,
            "logprobs": logprobs,
            "finish_reason": self._finish_word(index, choice.finish_reason),
        }
        if self._chat:
            body["message"] = {**message, "refusal": None}
        else:
            body["text"] = choice.echo + choice.text
            if self._call.return_prompt_logprobs:
                body["prompt_logprobs"] = self._prompt_scores(choice)
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
            read, as_ids = self._token_bytes, self._call.tokens_as_ids
            scores = [chosen_score(read, token, entry, as_ids=as_ids) for token, entry in pairs]
            return {"content": scores}
        return self._completion_logprobs(index, pairs)

    def _echoed(self, index: int, choice: ChoiceText) -> Body | None:
        """Log-probabilities of an echoed prompt; its first token has none."""
        if not self._call.echo or self._call.sampling.num_logprobs < 0:
            return None
        count = self._call.sampling.num_logprobs
        entries = [
            TokenLogprobs(entry.logprob, entry.top_ids[:count], entry.top_logprobs[:count])
            for entry in choice.prompt_logprobs
        ]
        first, *rest = choice.prompt_ids
        self._offsets[index] = len(self._text(first))
        body = self._completion_logprobs(index, list(zip(rest, entries, strict=True)))
        return {
            "tokens": [self._name(first), *body["tokens"]],
            "token_logprobs": [None, *body["token_logprobs"]],
            "top_logprobs": [None, *body["top_logprobs"]],
            "text_offset": [0, *body["text_offset"]],
        }

    def _prompt_scores(self, choice: ChoiceText) -> list[Body | None]:
        """VLLM's `prompt_logprobs`: per token its own entry and the most likely ones."""
        count = max(self._call.sampling.num_prompt_logprobs, 0)
        found: list[Body | None] = [None]
        for token_id, entry in zip(choice.prompt_ids[1:], choice.prompt_logprobs, strict=True):
            scores = {
                str(top_id): self._score(top_id, logprob, rank)
                for rank, (top_id, logprob) in enumerate(
                    zip(entry.top_ids[:count], entry.top_logprobs, strict=False), 1
                )
            }
            found.append(
                {str(token_id): self._score(token_id, entry.logprob, entry.rank), **scores}
            )
        return found

    def _score(self, token_id: int, logprob: float, rank: int) -> Body:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._text(token_id)}

    def _completion_logprobs(self, index: int, pairs: Sequence[tuple[int, TokenLogprobs]]) -> Body:
        offset = self._offsets.get(index, 0)
        tokens: list[str] = []
        offsets: list[int] = []
        for token_id, _ in pairs:
            tokens.append(self._name(token_id))
            offsets.append(offset)
            offset += len(self._text(token_id))
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for _, entry in pairs],
            "top_logprobs": [self._top(*pair) for pair in pairs],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, entry: TokenLogprobs) -> Mapping[str, float]:
        """The most likely tokens and the chosen one, which may be a further token."""
        top = [(token_id, entry.logprob), *zip(entry.top_ids, entry.top_logprobs, strict=True)]
        found: dict[str, float] = {}
        for top_id, logprob in top:
            # Tokens that are parts of characters can share a text; the first one is the most
            # likely.
            found.setdefault(self._name(top_id), _finite(logprob))
        return found

    def _name(self, token_id: int) -> str:
        return id_name(token_id) if self._call.tokens_as_ids else self._text(token_id)

    def _text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode(errors="replace")


def _thought(text: str | None) -> Body:
    """Thinking under both names that clients know: DeepSeek's and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def joined_logprobs(first: Body | None, second: Body | None) -> Body | None:
    """Concatenates the log-probabilities of two parts of a completion."""
    if first is None or second is None:
        return first or second
    return {key: [*first[key], *second[key]] for key in first}


_OPEN: Body = {"logprobs": None, "finish_reason": None}
_TEXT = "text_completion"


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
