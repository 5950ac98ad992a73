"""One call of the Responses API answered over HTTP, whole or as events.

Tests: tests/integration/test_gateway_responses.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from aiohttp import web

from kvmesh.core.errors import KvMeshError
from kvmesh.core.types import Usage
from services.gateway.answers import SSE_HEADERS, dumps, placement_headers
from services.gateway.errors import answer_for
from services.gateway.frontend import Choice, Frontend, usage_of
from services.gateway.reasoning import Thoughts, thinking_at
from services.gateway.request_record import TextDelta
from services.gateway.responses_api import Body, ResponsesBody
from services.gateway.responses_output import ResponseObject
from services.gateway.thinking_count import ThinkingCount
from services.gateway.token_scores import chosen_score
from services.gateway.tools import ToolReader


class ResponsesAnswer:
    """Runs the one generation of a response."""

    def __init__(
        self, frontend: Frontend, body: ResponsesBody, choice: Choice, request_id: str
    ) -> None:
        self._frontend = frontend
        self._choice = choice
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
        self._token_ids: list[int] = []
        self._cached_tokens = 0

    async def whole(self) -> web.Response:
        """The answer as one body."""
        headers: Mapping[str, str] = {}
        events: list[Body] = []
        async with aclosing(self._frontend.run(self._choice)) as deltas:
            async for delta in deltas:
                headers = placement_headers(delta.placed)
                events = self._events(delta)
        # The last event has the whole response.
        return web.json_response(events[-1]["response"], dumps=dumps, headers=headers)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """The answer as events; until the first tokens a refusal is still possible."""
        async with aclosing(self._frontend.run(self._choice)) as deltas:
            first = await anext(deltas)
            response = web.StreamResponse(
                headers={**SSE_HEADERS, **placement_headers(first.placed)}
            )
            with contextlib.suppress(ConnectionResetError):
                await response.prepare(request)
                await self._send_all(response, first, deltas)
        return response

    async def _send_all(
        self,
        response: web.StreamResponse,
        first: TextDelta,
        deltas: AsyncGenerator[TextDelta, None],
    ) -> None:
        try:
            await _send(response, self._object.opening() + self._events(first))
            async for delta in deltas:
                await _send(response, self._events(delta))
        except KvMeshError as error:
            await _send(response, self._object.failed(answer_for(error).body["error"]))
        await response.write_eof()

    def _events(self, delta: TextDelta) -> list[Body]:
        """The events of one piece, and after the last one those of the end."""
        self._token_ids += delta.token_ids
        if self._count is not None:  # as they come, not thousands at the end
            self._count.of(self._token_ids)
        self._cached_tokens = delta.cached_tokens
        is_last = delta.finish_reason is not None
        read = self._frontend.tokenizer.token_bytes
        scored = zip(delta.token_ids, delta.logprobs, strict=False)  # none, unless asked for
        scores = [chosen_score(read, token_id, entry) for token_id, entry in scored]
        events = self._object.push(delta.text, last=is_last, scores=scores)
        if is_last:
            events += self._object.closing(delta.finish_reason, self._usage())
        return events

    def _usage(self) -> Usage:
        num_prompt = len(self._choice.request.prompt_ids)
        reasoning = 0 if self._count is None else self._count.of(self._token_ids)
        return usage_of(num_prompt, len(self._token_ids), self._cached_tokens, reasoning)


async def _send(response: web.StreamResponse, events: list[Body]) -> None:
    if events:
        await response.write(b"".join(map(_encoded, events)))


def _encoded(event: Body) -> bytes:
    return f"event: {event['type']}\ndata: {dumps(event)}\n\n".encode()
