"""One call of the Responses API answered over HTTP, whole or as events.

Tests: tests/integration/test_gateway_responses.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvmesh.core.errors import KvMeshError
from kvmesh.core.types import FinishReason, TokenLogprobs, Usage
from services.gateway.api.answers import SSE_HEADERS, EventSink, Whole, dumps, placement_headers
from services.gateway.api.responses_api import Body, ResponsesBody
from services.gateway.api.responses_output import ResponseObject
from services.gateway.api.token_scores import chosen_score
from services.gateway.errors import answer_for
from services.gateway.frontend import Frontend, usage_of
from services.gateway.request.choice import Choice
from services.gateway.request.mesh import Placed
from services.gateway.tools.reasoning import Thoughts, thinking_at
from services.gateway.tools.thinking_count import ThinkingCount
from services.gateway.tools.tools import ToolReader


class ResponsesAnswer:
    """Runs the one generation of a response; its sink.

    Args:
        choices: the only one.
    """

    def __init__(
        self, frontend: Frontend, body: ResponsesBody, choices: Sequence[Choice], request_id: str
    ) -> None:
        self._frontend = frontend
        self._choices = choices
        (choice,) = choices
        call, tokenizer = choice.call, frontend.tokenizer
        thinking = thinking_at(call.reasoning, choice.request.prompt_ids, tokenizer.token_text)
        self._count = None if thinking is None else ThinkingCount(thinking, tokenizer.token_bytes)
        self._object = ResponseObject(
            body,
            request_id,
            frontend.served_name,
            int(time.time()),
            thoughts=None if thinking is None else Thoughts(thinking),
            tools=None if call.tools is None else ToolReader(call.tools, request_id),
        )
        self._num_prompt = len(choice.request.prompt_ids)
        self._token_ids: list[int] = []
        self._cached_tokens = 0
        self._last: list[Body] = []
        self._where: Placed
        self._out: EventSink | None = None

    async def whole(self) -> Whole:
        """The answer as one body."""
        await self._frontend.run(self._choices, [self])
        # The last event has the whole response.
        body = dumps(self._last[-1]["response"])
        return Whole(placement_headers(self._where), body.encode())

    async def stream(self, out: EventSink) -> None:
        """The answer as events; until the first tokens a refusal is still possible."""
        self._out = out
        try:
            await self._frontend.run(self._choices, [self])
        except KvMeshError as error:
            if not out.has_begun:
                raise
            out.end(_encoded(self._object.failed(answer_for(error).body["error"])))
        await out.sent()

    # --- a sink ---

    def placed(self, where: Placed) -> None:
        """See `Sink`."""
        self._where = where

    def first(self, cached_tokens: int, _: Sequence[TokenLogprobs]) -> None:
        """See `Sink`."""
        self._cached_tokens = cached_tokens

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
        opening = self._object.opening() if is_first else []  # its events have the first numbers
        self._token_ids += token_ids
        if self._count is not None:  # as they come, not thousands at the end
            self._count.of(self._token_ids)
        read = self._frontend.tokenizer.token_bytes
        scored = zip(token_ids, logprobs, strict=False)  # none, unless asked for
        scores = [chosen_score(read, token_id, entry) for token_id, entry in scored]
        events = self._object.push(text, last=finish is not None, scores=scores)
        if finish is not None:
            events += self._object.closing(finish, self._usage())
        if out is None:
            self._last = events
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
