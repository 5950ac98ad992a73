"""HTTP routes: the OpenAI API, health and metrics.

Owns the transport: headers, statuses, cancellation when a client goes away.
Tests: tests/integration/test_gateway_http.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from aiohttp import web

from kvmesh.core.errors import InvalidRequestError, KvMeshError
from kvmesh.core.types import Placement
from kvmesh.telemetry.exposition import exposition
from services.gateway.admission import Ticket
from services.gateway.answers import Answer, dumps
from services.gateway.config import HttpConfig
from services.gateway.errors import (
    ErrorAnswer,
    answer_for,
    error_body,
    plain_http_error,
)
from services.gateway.frontend import Caller, Choice, Frontend, clean_request_id
from services.gateway.openai import ApiCall, chat_call, check_model, completion_call
from services.gateway.openapi import openapi_page
from services.gateway.responses_answer import ResponsesAnswer
from services.gateway.responses_api import RESPONSES_UNSUPPORTED, ResponsesBody, as_chat
from services.gateway.schema import ChatBody, CompletionBody, parse_body
from services.gateway.token_routes import DetokenizeBody, TokenizeBody, detokenize, tokenize

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID_HEADERS = ("x-request-id", "x-correlation-id", "request-id")
MAX_TTFT_MS = 3_600_000

_PLACEMENTS = {placement.value: placement for placement in Placement}
_REQUEST_ID = web.RequestKey("request_id", str)


class HttpFront:
    """The HTTP side of the gateway.

    Args:
        created: when the model was loaded, in seconds since the epoch.
    """

    def __init__(
        self,
        frontend: Frontend,
        config: HttpConfig,
        created: int,
    ) -> None:
        self._frontend = frontend
        self._config = config
        self._created = created

    def app(self) -> web.Application:
        """The application with all routes."""
        app = web.Application(
            client_max_size=self._config.max_body_bytes, middlewares=[self._errors]
        )
        app.on_response_prepare.append(_add_request_id)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.chat_completions),
                web.post("/v1/completions", self.completions),
                web.post("/v1/responses", self.responses),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.get("/openapi.json", self.openapi),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{model:.+}", self.model),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/metrics", self.metrics),
                web.get("/version", self.version),
            ]
        )
        return app

    # --- the OpenAI API ---

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        async with self._frontend.admit(_authorization(request)) as ticket:
            body = parse_body(ChatBody, await self._json(request))
            defaults = self._frontend.tokenizer.sampling_defaults
            family = self._frontend.tokenizer.chat.tool_family
            call = chat_call(body, self._frontend.limits, defaults, family)
            return await self._answer(request, call, ticket)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        async with self._frontend.admit(_authorization(request)) as ticket:
            body = parse_body(CompletionBody, await self._json(request))
            defaults = self._frontend.tokenizer.sampling_defaults
            call = completion_call(body, self._frontend.limits, defaults)
            return await self._answer(request, call, ticket)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        async with self._frontend.admit(_authorization(request)) as ticket:
            body = parse_body(ResponsesBody, await self._json(request), RESPONSES_UNSUPPORTED)
            defaults = self._frontend.tokenizer.sampling_defaults
            call = chat_call(as_chat(body), self._frontend.limits, defaults)
            call = replace(call, prompt_field="input", max_tokens_field="max_output_tokens")
            request_id, (choice,) = await self._prepare(request, call, ticket)
            answer = ResponsesAnswer(self._frontend, body, choice, request_id)
            return await (answer.stream(request) if call.stream else answer.whole())

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /tokenize."""
        async with self._frontend.admit(_authorization(request)):
            body = parse_body(TokenizeBody, await self._json(request), {})
            return web.json_response(await tokenize(self._frontend, body), dumps=dumps)

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /detokenize."""
        async with self._frontend.admit(_authorization(request)):
            body = parse_body(DetokenizeBody, await self._json(request), {})
            return web.json_response(await detokenize(self._frontend, body), dumps=dumps)

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models."""
        self._frontend.check_key(_authorization(request))
        return web.json_response({"object": "list", "data": [self._model_card()]}, dumps=dumps)

    async def model(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models/{model}."""
        self._frontend.check_key(_authorization(request))
        check_model(request.match_info["model"], self._frontend.served_name)
        return web.json_response(self._model_card(), dumps=dumps)

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._frontend.served_name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvmesh",
            "max_model_len": self._frontend.max_model_len,
        }

    async def _answer(
        self, request: web.Request, call: ApiCall, ticket: Ticket
    ) -> web.StreamResponse:
        request_id, choices = await self._prepare(request, call, ticket)
        answer = Answer(self._frontend, call, choices, request_id)
        return await (answer.stream(request) if call.stream else answer.whole())

    async def _prepare(
        self, request: web.Request, call: ApiCall, ticket: Ticket
    ) -> tuple[str, list[Choice]]:
        """The request's id and its generations."""
        if call.request_id and not _given_request_id(request):
            request[_REQUEST_ID] = clean_request_id(call.request_id)
        request_id = request[_REQUEST_ID]
        caller = caller_of(request, request_id, ticket)
        return request_id, await self._frontend.prepare(call, caller)

    # --- operations ---

    async def openapi(self, _request: web.Request) -> web.StreamResponse:
        """GET /openapi.json."""
        return web.json_response(openapi_page(version("kvmesh")), dumps=dumps)

    async def health(self, _request: web.Request) -> web.StreamResponse:
        """GET /health: the process lives."""
        return web.json_response({"status": "ok"})

    async def ready(self, _request: web.Request) -> web.StreamResponse:
        """GET /ready: requests can be served now."""
        reason = self._frontend.not_ready
        if not reason:
            return web.json_response({"status": "ready"})
        body = error_body(reason, "not_ready")
        return web.json_response({"status": "not ready", **body}, status=503)

    async def metrics(self, _request: web.Request) -> web.StreamResponse:
        """GET /metrics, in Prometheus' text format."""
        return web.Response(
            body=exposition(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def version(self, _request: web.Request) -> web.StreamResponse:
        """GET /version."""
        return web.json_response({"version": version("kvmesh")})

    # --- errors ---

    async def _json(self, request: web.Request) -> Any:
        return await _json(request, self._config.body_timeout_s)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request[_REQUEST_ID] = clean_request_id(_given_request_id(request))
        try:
            return await handler(request)
        except KvMeshError as error:
            return _error_response(answer_for(error))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return _error_response(_http_error(error, request, self._config))


def caller_of(request: web.Request, request_id: str, ticket: Ticket) -> Caller:
    """What the headers say.

    Raises:
        InvalidRequestError: a header has a value that is not allowed.
    """
    headers = request.headers
    return Caller(
        request_id=request_id,
        scenario=headers.get("x-kvmesh-scenario", ""),
        placement=parse_placement(headers.get("x-kvmesh-placement", "")),
        ttft_ms=parse_ttft_ms(headers.get("x-slo-ttft-ms", "")),
        traceparent=headers.get("traceparent", ""),
        ticket=ticket,
    )


def parse_placement(text: str) -> Placement:
    """The placement header's value; empty lets the scheduler decide.

    Raises:
        InvalidRequestError: another word.
    """
    if text and text not in _PLACEMENTS:
        allowed = ", ".join(sorted(_PLACEMENTS))
        raise InvalidRequestError(
            f"x-kvmesh-placement: {text!r}; allowed: {allowed}", "x-kvmesh-placement"
        )
    return _PLACEMENTS.get(text, Placement.AUTO)


def parse_ttft_ms(text: str) -> int:
    """The deadline header's value; 0 without one.

    Raises:
        InvalidRequestError: not a whole number of milliseconds in range.
    """
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= MAX_TTFT_MS):
        raise InvalidRequestError(
            f"x-slo-ttft-ms: {text!r}; allowed: 1 to {MAX_TTFT_MS} (milliseconds)", "x-slo-ttft-ms"
        )
    return int(text)


def _authorization(request: web.Request) -> str:
    return request.headers.get("Authorization", "")


def _given_request_id(request: web.Request) -> str:
    found = (request.headers.get(name, "") for name in REQUEST_ID_HEADERS)
    return next((name for name in found if name), "")


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = request.get(_REQUEST_ID, "")
    response.headers["Server"] = "kvmesh"  # not the versions of what it is built with


async def _json(request: web.Request, timeout_s: float) -> Any:
    try:
        # Most bodies are short and here already: nothing to be patient about.
        async with asyncio.timeout(None if request.content.is_eof() else timeout_s):
            raw = await request.read()
    except TimeoutError as error:
        request.protocol.force_close()  # what is still to come is not waited for
        raise web.HTTPRequestTimeout from error
    try:
        content = json.loads(raw)
        if b"\\u" in raw:  # halves of characters are JSON, but no text
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"the body is not valid JSON: {error}", code="bad_json"
        ) from error


def _http_error(error: web.HTTPException, request: web.Request, config: HttpConfig) -> ErrorAnswer:
    messages = {
        404: f"{request.path} does not exist; the API is under /v1",
        405: f"{request.path} does not take {request.method}; allowed: "
        f"{error.headers.get('Allow', '')}",
        408: f"the body did not come within {config.body_timeout_s} s",
        413: f"the body is longer than {config.max_body_bytes} bytes",
    }
    answer = plain_http_error(error.status, messages.get(error.status, error.reason))
    allow = error.headers.get("Allow")
    return ErrorAnswer(answer.status, answer.body, {"Allow": allow} if allow else {})


def _error_response(answer: ErrorAnswer) -> web.Response:
    return web.json_response(answer.body, status=answer.status, headers=answer.headers, dumps=dumps)
