"""HTTP routes: OpenAI's and Anthropic's API, health and metrics.

Owns the transport: headers, statuses, cancellation when a client leaves.
Tests: tests/integration/test_gateway_http.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from aiohttp import web

from kvmesh.core.errors import InvalidRequestError, KvMeshError
from kvmesh.telemetry.exposition import exposition
from services.gateway.api.answers import Whole, dumps
from services.gateway.api.anthropic_api import MESSAGES_UNSUPPORTED, CountBody, as_counted_chat
from services.gateway.api.anthropic_output import MESSAGES
from services.gateway.api.embeddings import (
    UNSUPPORTED,
    EmbeddingBody,
    Embeddings,
    embedding_call,
)
from services.gateway.api.openai import ApiCall, chat_call
from services.gateway.api.responses_output import RESPONSES
from services.gateway.api.schema import BodyT, ChatBody, parse_body
from services.gateway.api.single_answer import Form, SingleAnswer
from services.gateway.api.token_routes import (
    DetokenizeBody,
    TokenizeBody,
    count_tokens,
    detokenize,
    tokenize,
    tokenizer_info,
)
from services.gateway.config import HttpConfig
from services.gateway.entrance import Entrance, model_of
from services.gateway.errors import (
    ErrorAnswer,
    answer_for,
    anthropic_body,
    error_body,
    plain_http_error,
)
from services.gateway.frontend import Frontend, clean_request_id
from services.gateway.fronts.arrivals import DatedConnection
from services.gateway.fronts.calls import (
    PATHS,
    Calls,
    Headers,
    caller_of,
    given_request_id,
    parse_json,
    ttft_ms_of,
)
from services.gateway.fronts.openapi import openapi_page
from services.gateway.metrics import TENANT
from services.gateway.request.choice import Caller
from services.gateway.request.event_ids import HEADER
from services.gateway.tenants.admission import Ticket

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

JSON, UTF_8 = "application/json", "utf-8"

ANTHROPIC = "/v1/messages"
"""Start of the paths whose errors have Anthropic's format, and whose keys may be in its header."""

_POOLING = frozenset({"/pooling", "/classify", "/score", "/rerank"})
"""Paths of vLLM's server for models that generate nothing."""

_REQUEST_ID = web.RequestKey("request_id", str)


class HttpFront:
    """The HTTP side of the gateway.

    Args:
        created: when the models were loaded, in seconds since the epoch.

    Attributes:
        more_routes: further routes of the application.
        calls: answers completions; `DirectHttp` uses it too.
    """

    def __init__(
        self,
        entrance: Entrance,
        config: HttpConfig,
        created: int,
    ) -> None:
        self._entrance = entrance
        self.calls = Calls(entrance)
        self._config = config
        self._created = created
        self.more_routes: Sequence[web.RouteDef] = ()

    def app(self) -> web.Application:
        """The application with all routes."""
        app = web.Application(
            client_max_size=self._config.max_body_bytes, middlewares=[self._errors]
        )
        app.on_response_prepare.append(self._add_headers)
        app.add_routes(
            [
                *(web.post(path, self.completions) for path in PATHS),
                web.post("/v1/responses", self.responses),
                web.post(ANTHROPIC, self.messages),
                web.post(f"{ANTHROPIC}/count_tokens", self.count_tokens),
                web.post("/v1/embeddings", self.embeddings),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.get("/tokenizer_info", self.tokenizer_info),
                web.get("/openapi.json", self.openapi),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{model:.+}", self.model),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/metrics", self.metrics),
                web.get("/version", self.version),
                *self.more_routes,
            ]
        )
        return app

    def is_draining(self) -> bool:
        """Whether connections close after their next answer."""
        return self._entrance.is_draining

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        request_id = request.get(_REQUEST_ID, "")
        response.headers["x-request-id"] = request_id
        if request.path.startswith(ANTHROPIC):
            response.headers["request-id"] = request_id
        response.headers["Server"] = "kvmesh"  # without the versions of the libraries in use
        if self._entrance.is_draining:
            response.headers["Connection"] = "close"
            response.force_close()

    # --- the OpenAI API ---

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions and /v1/completions."""
        exchange = _AiohttpExchange(request, self._config)
        async with contextlib.aclosing(exchange):
            whole = await self.calls.answer(PATHS[request.path], exchange)
        if whole is None:
            return exchange.response
        return _answered(whole)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        return await self._single(request, RESPONSES)

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/embeddings."""
        async with self._entrance.admit(authorization_of(request)) as ticket:
            frontend, content, arrived_at = await self._of_model(request)
            frontend.check_embeds()
            body = parse_body(EmbeddingBody, content, UNSUPPORTED)
            call = embedding_call(body, frontend.limits)
            caller = self._caller(request, call, arrived_at, ticket)
            choices = await frontend.prepare(call, caller)
            return _answered(await Embeddings(frontend, choices).whole(body))

    # --- Anthropic's API ---

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        return await self._single(request, MESSAGES)

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages/count_tokens."""
        async with self._entrance.admit(authorization_of(request)):
            content = await self._json(request)
            frontend = self._entrance.of(model_of(content))
            body = parse_body(CountBody, content, MESSAGES_UNSUPPORTED)
            count = await count_tokens(frontend, _chat_call(frontend, as_counted_chat(body)))
            return web.json_response({"input_tokens": count})

    async def _single(self, request: web.Request, form: Form[BodyT]) -> web.StreamResponse:
        if HEADER in request.headers:  # otherwise the client would silently get a different answer
            raise InvalidRequestError(
                f"Last-Event-ID: streams of {request.path} cannot be resumed, and their events "
                "have no id; send the request without this header for a new answer",
                HEADER,
            )
        async with self._entrance.admit(authorization_of(request)) as ticket:
            frontend, content, arrived_at = await self._of_model(request)
            body = parse_body(form.body, content, form.unsupported)
            call = _chat_call(frontend, form.as_chat(body))
            call = replace(
                call, prompt_field=form.prompt_field, max_tokens_field=form.max_tokens_field
            )
            caller = self._caller(request, call, arrived_at, ticket)
            choices = await frontend.prepare(call, caller)
            answer = SingleAnswer(frontend, form, body, choices, caller.request_id)
            if not call.stream:
                return _answered(await answer.whole())
            async with contextlib.aclosing(_AiohttpExchange(request, self._config)) as exchange:
                await answer.stream(exchange)
            return exchange.response

    async def _of_model(self, request: web.Request) -> tuple[Frontend, Any, float]:
        """Waits for a call's body, and its turn.

        Returns:
            The frontend of its model, its JSON value, and when it came.
        """
        raw, arrived_at = await self._raw(request), _arrived_at(request)
        await self._entrance.turn(arrived_at, ttft_ms_of(request.headers))
        content = parse_json(raw)
        return self._entrance.of(model_of(content)), content, arrived_at

    def _caller(
        self, request: web.Request, call: ApiCall, arrived_at: float, ticket: Ticket
    ) -> Caller:
        """The caller; an id in the call's body replaces a new one."""
        if call.request_id and not given_request_id(request.headers):
            request[_REQUEST_ID] = clean_request_id(call.request_id)
        return caller_of(request.headers, arrived_at, request[_REQUEST_ID], ticket)

    # --- tokens and models ---

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /tokenize."""
        async with self._entrance.admit(authorization_of(request)):
            content = await self._json(request)
            frontend = self._entrance.of(model_of(content))
            body = parse_body(TokenizeBody, content, {})
            return web.json_response(text=await tokenize(frontend, body))

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /detokenize."""
        async with self._entrance.admit(authorization_of(request)):
            content = await self._json(request)
            frontend = self._entrance.of(model_of(content))
            body = parse_body(DetokenizeBody, content, {})
            return web.json_response(await detokenize(frontend, body), dumps=dumps)

    async def tokenizer_info(self, request: web.Request) -> web.StreamResponse:
        """GET /tokenizer_info; `?model=NAME` selects the model."""
        self._entrance.check_key(authorization_of(request))
        frontend = self._entrance.of(request.query.get("model", ""))
        return web.json_response(tokenizer_info(frontend), dumps=dumps)

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models."""
        self._entrance.check_key(authorization_of(request))
        data = [self._model_card(name) for name in self._entrance.names]
        return web.json_response({"object": "list", "data": data}, dumps=dumps)

    async def model(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models/{model}."""
        self._entrance.check_key(authorization_of(request))
        card = self._model_card(request.match_info["model"])
        return web.json_response(card, dumps=dumps)

    def _model_card(self, name: str) -> dict[str, Any]:
        frontend = self._entrance.of(name)
        is_adapter = bool(frontend.served.adapter(name))
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvmesh",
            "max_model_len": frontend.max_model_len,
            "root": name if is_adapter else frontend.served_name,
            "parent": frontend.served_name if is_adapter else None,
        }

    # --- operations ---

    async def openapi(self, _request: web.Request) -> web.StreamResponse:
        """GET /openapi.json."""
        page = openapi_page(version("kvmesh"), adapter_changes=self._config.adapter_changes)
        return web.json_response(page, dumps=dumps)

    async def health(self, _request: web.Request) -> web.StreamResponse:
        """GET /health: the process is alive."""
        return web.json_response({"status": "ok"})

    async def ready(self, _request: web.Request) -> web.StreamResponse:
        """GET /ready: whether any model can serve requests now; the answer names the others."""
        entrance = self._entrance
        if entrance.is_draining:
            reason, failed = "draining", {}
        else:
            failed = entrance.not_ready
            reason = "; ".join(failed.values()) if len(failed) == len(entrance.frontends) else ""
        if reason:
            body = error_body(reason, "not_ready")
            return web.json_response({"status": "not ready", **body}, status=503)
        notes = {"missing_native": entrance.missing_native, "not_ready": failed}
        told = {name: note for name, note in notes.items() if note}
        return web.json_response({"status": "ready", **told})

    async def metrics(self, _request: web.Request) -> web.StreamResponse:
        """GET /metrics in Prometheus' text format; without metrics by tenant unless configured."""
        return web.Response(
            body=exposition(without="" if self._config.tenant_metrics else TENANT),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def version(self, _request: web.Request) -> web.StreamResponse:
        """GET /version."""
        return web.json_response({"version": version("kvmesh")})

    # --- errors ---

    async def _raw(self, request: web.Request) -> bytes:
        return await read_body(request, self._config.body_timeout_s)

    async def _json(self, request: web.Request) -> Any:
        return parse_json(await self._raw(request))

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request[_REQUEST_ID] = clean_request_id(given_request_id(request.headers))
        try:
            return await handler(request)
        except KvMeshError as error:
            answer = answer_for(error)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            answer = _http_error(error, request, self._config)
        if request.path.startswith(ANTHROPIC):
            answer = replace(answer, body=anthropic_body(answer, request[_REQUEST_ID]))
        return _error_response(answer)


class _AiohttpExchange:
    """A request that aiohttp read, as `Calls` sees it.

    Attributes:
        response: the streamed response; unused if the answer is a single body.
    """

    def __init__(self, request: web.Request, config: HttpConfig) -> None:
        self._request = request
        self._config = config
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._sending: asyncio.Task[None] | None = None
        self.response = web.StreamResponse()
        self.arrived_at = 0.0

    @property
    def request_id(self) -> str:
        return self._request[_REQUEST_ID]

    @request_id.setter
    def request_id(self, name: str) -> None:
        self._request[_REQUEST_ID] = name

    @property
    def headers(self) -> Headers:
        return self._request.headers

    @property
    def has_begun(self) -> bool:
        return self._sending is not None

    async def body(self) -> bytes:
        body = await read_body(self._request, self._config.body_timeout_s)
        self.arrived_at = _arrived_at(self._request)
        return body

    def begin(self, headers: Mapping[str, str], data: bytes) -> None:
        self.response.headers.update(headers)
        self._sending = asyncio.get_running_loop().create_task(self._send())
        self._events.put_nowait(data)

    def write(self, data: bytes) -> None:
        self._events.put_nowait(data)

    def end(self, data: bytes) -> None:
        if data:
            self._events.put_nowait(data)
        self._events.put_nowait(None)

    async def sent(self) -> None:
        assert self._sending is not None, "it has begun"
        await self._sending

    async def aclose(self) -> None:
        """Stops sending. May be called again."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _send(self) -> None:
        # A client may leave between two events, before its handler is cancelled: no error.
        with contextlib.suppress(ConnectionResetError):
            await self.response.prepare(self._request)
            while (data := await self._events.get()) is not None:
                await self.response.write(data)
            await self.response.write_eof()


def _chat_call(frontend: Frontend, body: ChatBody) -> ApiCall:
    tokenizer = frontend.tokenizer
    families = (tokenizer.chat.tool_family, tokenizer.chat.reasoning_family)
    return chat_call(body, frontend.limits, tokenizer.sampling_defaults, *families)


def _answered(whole: Whole) -> web.Response:
    return web.Response(body=whole.content, headers=whole.headers, content_type=JSON, charset=UTF_8)


def _arrived_at(request: web.Request) -> float:
    connection = request.protocol
    assert isinstance(connection, DatedConnection), "of this gateway's port"
    return connection.arrival()


def authorization_of(request: web.Request) -> str:
    """The Authorization header; Anthropic's clients have a header of their own for the key."""
    given = request.headers.get("Authorization", "")
    if not given and request.path.startswith(ANTHROPIC):
        key = request.headers.get("x-api-key", "")
        return f"Bearer {key}" if key else ""
    return given


def http_refusal(status: int, message: str) -> web.Response:
    """The answer to a request that reached no route."""
    return _error_response(plain_http_error(status, message))


async def read_body(request: web.Request, timeout_s: float) -> bytes:
    """A request's body.

    Raises:
        HTTPException: it is encoded, too long, too slow or broken off.
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise web.HTTPUnsupportedMediaType
    if (request.content_length or 0) > request.client_max_size:
        # Refused at once: aiohttp reads on for some seconds, so the client sees the answer.
        raise web.HTTPRequestEntityTooLarge(request.client_max_size, request.content_length or 0)
    try:
        # Most bodies are short and complete already, so they need no timeout.
        async with asyncio.timeout(None if request.content.is_eof() else timeout_s):
            return await request.read()
    except TimeoutError as error:
        request.protocol.force_close()  # the rest of the body is not awaited
        raise web.HTTPRequestTimeout from error
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest(reason="the body cannot be read") from error


def _http_error(error: web.HTTPException, request: web.Request, config: HttpConfig) -> ErrorAnswer:
    unknown = f"{request.path} does not exist; the API is under /v1, all of it in /openapi.json"
    if request.path.removeprefix("/v1") in _POOLING:
        unknown = (
            f"{request.path}: workers here generate text and compute embeddings (/v1/embeddings), "
            "but no scores; run `vllm serve` with the scoring model beside the mesh"
        )
    messages = {
        404: unknown,
        405: f"{request.path} does not take {request.method}; allowed: "
        f"{error.headers.get('Allow', '')}",
        408: f"the body did not come within {config.body_timeout_s} s",
        413: f"the body is longer than {config.max_body_bytes} bytes",
        415: "a body with a Content-Encoding is not read: send it as it is",
    }
    answer = plain_http_error(error.status, messages.get(error.status, error.reason))
    allow = error.headers.get("Allow")
    return ErrorAnswer(answer.status, answer.body, {"Allow": allow} if allow else {})


def _error_response(answer: ErrorAnswer) -> web.Response:
    return web.json_response(answer.body, status=answer.status, headers=answer.headers, dumps=dumps)
