"""One call of the Responses API answered over HTTP, whole or as events.

Tests: tests/integration/test_gateway_api.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from kvmesh.core.errors import KvMeshError
from kvmesh.core.types import FinishReason, Usage
from services.gateway.answers import SSE_HEADERS, dumps, placement_headers
from services.gateway.errors import answer_for
from services.gateway.frontend import Choice, Frontend, usage_of
from services.gateway.request_record import TextDelta
from services.gateway.responses_api import Body, ResponseObject, ResponsesBody


class ResponsesAnswer:
    """Runs the one generation of a response."""

    def __init__(
        self, frontend: Frontend, body: ResponsesBody, choice: Choice, request_id: str
    ) -> None:
        self._frontend = frontend
        self._choice = choice
        self._object = ResponseObject(body, request_id, frontend.served_name, int(time.time()))
        self._text: list[str] = []
        self._num_tokens = 0
        self._cached_tokens = 0
        self._finish: FinishReason | None = None

    async def whole(self) -> web.Response:
        """The answer as one body."""
        headers: dict[str, str] = {}
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                headers = placement_headers(delta.placed)
        body = self._object.whole("".join(self._text), self._finish, self._usage())
        return web.json_response(body, dumps=dumps, headers=headers)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """The answer as events; until the first tokens a refusal is still possible."""
        async with aclosing(self._deltas()) as deltas:
            first = await anext(deltas)
            response = web.StreamResponse(headers=SSE_HEADERS | placement_headers(first.placed))
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
            for event in [*self._object.opening(), self._object.delta(first.text)]:
                await _send(response, event)
            async for delta in deltas:
                if delta.text:
                    await _send(response, self._object.delta(delta.text))
            ending = self._object.closing("".join(self._text), self._finish, self._usage())
        except KvMeshError as error:
            ending = self._object.failed(answer_for(error).body["error"])
        for event in ending:
            await _send(response, event)
        await response.write_eof()

    async def _deltas(self) -> AsyncGenerator[TextDelta, None]:
        async with aclosing(self._frontend.run(self._choice)) as deltas:
            async for delta in deltas:
                self._text.append(delta.text)
                self._num_tokens += len(delta.token_ids)
                self._cached_tokens = delta.cached_tokens
                self._finish = delta.finish_reason
                yield delta

    def _usage(self) -> Usage:
        num_prompt = len(self._choice.request.prompt_ids)
        return usage_of(num_prompt, self._num_tokens, self._cached_tokens)


async def _send(response: web.StreamResponse, event: Body) -> None:
    name = event["type"].encode()
    await response.write(b"event: " + name + b"\ndata: " + dumps(event).encode() + b"\n\n")
