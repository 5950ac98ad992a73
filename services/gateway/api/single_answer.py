"""Answers a call with one generation over HTTP, in an API's own format: as one body, or as events.

Tests: tests/integration/test_gateway_responses.py, tests/integration/test_gateway_messages.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol

from kvmesh.core.errors import KvMeshError
from kvmesh.core.types import FinishReason, TokenLogprobs, Usage
from services.gateway.api.answers import SSE_HEADERS, EventSink, Whole, dumps, placement_headers
from services.gateway.api.responses import Body
from services.gateway.api.schema import BodyT, ChatBody
from services.gateway.api.token_scores import chosen_score
from services.gateway.errors import ErrorAnswer, answer_for
from services.gateway.frontend import Frontend, usage_of
from services.gateway.request.choice import Choice
from services.gateway.request.mesh import Placed
from services.gateway.tools.pieces import PieceReader
from services.gateway.tools.reasoning import Thoughts, thinking_at
from services.gateway.tools.thinking_count import ThinkingCount
from services.gateway.tools.tools import ToolReader


@dataclass(frozen=True, slots=True)
class Generation:
    """Facts of the generation behind an answer.

    Attributes:
        model: served name.
        created: seconds since the epoch.
        reader: separates its thinking, text and calls.
    """

    request_id: str
    model: str
    created: int
    reader: PieceReader


class Output(Protocol):
    """Makes the bodies and events of one answer; each event has its `type`."""

    def opening(self, usage: Usage) -> list[Body]:
        """The stream's first events.

        Args:
            usage: the prompt's token counts; no tokens were generated yet.
        """
        ...

    def push(self, text: str, *, last: bool, scores: Sequence[Body] = ()) -> list[Body]:
        """Events for more text.

        Args:
            last: this is the end of the text.
            scores: log-probabilities of its tokens, if the client asked for them.
        """
        ...

    def closing(self, finish: FinishReason, usage: Usage, stop: str) -> list[Body]:
        """The stream's last events.

        Args:
            finish: how the generation ended.
            stop: the stop string that ended it; empty if none did.
        """
        ...

    def whole(self) -> Body:
        """The answer as one body; call it after `closing`."""
        ...

    def failed(self, answer: ErrorAnswer) -> list[Body]:
        """The events with which an error ends a stream."""
        ...


@dataclass(frozen=True, slots=True)
class Form(Generic[BodyT]):
    """An API that answers chats in its own format.

    Attributes:
        body: the pydantic model of its requests.
        unsupported: see `parse_body`.
        as_chat: converts a body to a chat; raises InvalidRequestError.
        output: makes its answers.
        prompt_field, max_tokens_field: the names of these fields in the body, for errors.
    """

    body: type[BodyT]
    unsupported: Mapping[str, tuple[Any, ...]]
    as_chat: Callable[[BodyT], ChatBody]
    output: Callable[[BodyT, Generation], Output]
    prompt_field: str
    max_tokens_field: str


class SingleAnswer(Generic[BodyT]):
    """Runs the generation of one call, and is its sink.

    Args:
        body: the request's body.
        choices: exactly one.
    """

    def __init__(
        self,
        frontend: Frontend,
        form: Form[BodyT],
        body: BodyT,
        choices: Sequence[Choice],
        request_id: str,
    ) -> None:
        self._frontend = frontend
        self._choices = choices
        (choice,) = choices
        call, tokenizer = choice.call, frontend.tokenizer
        thinking = thinking_at(call.reasoning, choice.request.prompt_ids, tokenizer.token_text)
        self._count = None if thinking is None else ThinkingCount(thinking, tokenizer.token_bytes)
        reader = PieceReader(
            None if thinking is None else Thoughts(thinking),
            None if call.tools is None else ToolReader(call.tools, request_id),
        )
        generation = Generation(request_id, choice.model_name, int(time.time()), reader)
        self._output = form.output(body, generation)
        self._num_prompt = len(choice.request.prompt_ids)
        self._token_ids: list[int] = []
        self._cached_tokens = 0
        self._stop = ""
        self._where: Placed
        self._out: EventSink | None = None

    async def whole(self) -> Whole:
        """The answer as one body."""
        await self._frontend.run(self._choices, [self])
        return Whole(placement_headers(self._where), dumps(self._output.whole()).encode())

    async def stream(self, out: EventSink) -> None:
        """Sends the answer as events.

        The head waits for the first tokens, since a refusal is possible.
        """
        self._out = out
        try:
            await self._frontend.run(self._choices, [self])
        except KvMeshError as error:
            if not out.has_begun:
                raise
            out.end(_encoded(self._output.failed(answer_for(error))))
        await out.sent()

    # --- a sink ---

    def placed(self, where: Placed) -> None:
        """See `Sink`."""
        self._where = where

    def first(self, cached_tokens: int, _: Sequence[TokenLogprobs], __: bytes) -> None:
        """See `Sink`."""
        self._cached_tokens = cached_tokens

    def stopped(self, stop: str) -> None:
        """See `Sink`."""
        self._stop = stop

    def push(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
    ) -> None:
        """See `Sink`."""
        out = self._out
        is_first = out is not None and not out.has_begun
        # Before `push`: events are numbered in the order of these calls.
        opening = self._output.opening(self._usage()) if is_first else []
        self._token_ids += token_ids
        if self._count is not None:  # per piece: counting thousands at the end would stall others
            self._count.of(self._token_ids)
        read = self._frontend.tokenizer.token_bytes
        scored = zip(token_ids, logprobs, strict=False)  # `logprobs` may be empty
        scores = [chosen_score(read, token_id, entry) for token_id, entry in scored]
        events = self._output.push(text, last=finish is not None, scores=scores)
        if finish is not None:
            events += self._output.closing(finish, self._usage(), self._stop)
        if out is None:
            return
        if is_first:
            headers = {**SSE_HEADERS, **placement_headers(self._where)}
            out.begin(headers, _encoded(opening + events))
        elif events:
            out.write(_encoded(events))
        if finish is not None:
            out.end(b"")

    def _usage(self) -> Usage:
        reasoning = 0 if self._count is None else self._count.of(self._token_ids)
        return usage_of(self._num_prompt, len(self._token_ids), self._cached_tokens, reasoning)


def _encoded(events: list[Body]) -> bytes:
    return b"".join(
        f"event: {event['type']}\ndata: {dumps(event)}\n\n".encode() for event in events
    )
