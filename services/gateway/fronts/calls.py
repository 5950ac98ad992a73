"""A chat or text completion from its body to its answer, whatever server it came in by.

Tests: tests/integration/test_gateway_http.py.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from kvmesh.core.errors import InvalidRequestError
from kvmesh.core.types import Placement
from services.gateway.api.answers import Answer, EventSink, Whole
from services.gateway.api.openai import (
    ApiCall,
    Endpoint,
    chat_call,
    completion_call,
    with_reasoning,
)
from services.gateway.api.plain_call import plain_chat_call
from services.gateway.api.schema import ChatBody, CompletionBody, parse_body
from services.gateway.frontend import Frontend, clean_request_id
from services.gateway.request.choice import Caller
from services.gateway.tenants.admission import Ticket

REQUEST_ID_HEADERS = ("x-request-id", "x-correlation-id", "request-id")
MAX_TTFT_MS = 3_600_000

PATHS = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETION,
}

_PLACEMENTS = {placement.value: placement for placement in Placement}


class Headers(Protocol):
    """A request's headers; names are looked up in lower case."""

    def get(self, name: str, default: str, /) -> str:
        """The first value of a header."""
        ...


class Exchange(EventSink, Protocol):
    """One HTTP request and the way back to its client.

    Attributes:
        request_id: goes into the answer's headers; a body may bring another one.
    """

    request_id: str

    @property
    def headers(self) -> Headers:
        """The request's headers."""
        ...

    async def body(self) -> bytes:
        """The request's whole body."""
        ...


class Calls:
    """Answers completions of both kinds."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def answer(self, endpoint: Endpoint, exchange: Exchange) -> Whole | None:
        """Answers a call.

        Returns:
            The answer; None when it was sent to the exchange as events.

        Raises:
            KvMeshError: nothing was sent yet, and this is why nothing will be.
        """
        headers = exchange.headers
        async with self._frontend.admit(headers.get("authorization", "")) as ticket:
            call = self._call(endpoint, parse_json(await exchange.body()))
            if call.request_id and not given_request_id(headers):
                exchange.request_id = clean_request_id(call.request_id)
            caller = caller_of(headers, exchange.request_id, ticket)
            choices = await self._frontend.prepare(call, caller)
            lives = self._frontend.begin(choices)
            try:
                answer = Answer(self._frontend, call, choices, exchange.request_id)
                if not call.stream:
                    return await answer.whole(lives)
                await answer.stream(lives, exchange)
                return None
            finally:
                for life in lives:
                    life.close()

    def _call(self, endpoint: Endpoint, content: Any) -> ApiCall:
        frontend = self._frontend
        defaults = frontend.tokenizer.sampling_defaults
        if endpoint is Endpoint.CHAT:
            chat = frontend.tokenizer.chat
            if (call := plain_chat_call(content, defaults)) is not None:
                return with_reasoning(call, chat.reasoning_family, include=True)
            body = parse_body(ChatBody, content)
            families = (chat.tool_family, chat.reasoning_family)
            return chat_call(body, frontend.limits, defaults, *families)
        return completion_call(parse_body(CompletionBody, content), frontend.limits, defaults)


def caller_of(headers: Headers, request_id: str, ticket: Ticket) -> Caller:
    """What the headers say.

    Raises:
        InvalidRequestError: a header has a value that is not allowed.
    """
    return Caller(
        request_id=request_id,
        scenario=parse_scenario(headers.get("x-kvmesh-scenario", "")),
        placement=parse_placement(headers.get("x-kvmesh-placement", "")),
        ttft_ms=parse_ttft_ms(headers.get("x-slo-ttft-ms", "")),
        traceparent=headers.get("traceparent", ""),
        ticket=ticket,
    )


def parse_scenario(text: str) -> str:
    """The scenario header's value; bytes of it that are no UTF-8 come as halves of characters.

    Raises:
        InvalidRequestError: it is no text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("x-kvmesh-scenario: not UTF-8", "x-kvmesh-scenario") from error
    return text


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


def given_request_id(headers: Headers) -> str:
    """The caller's name for the request; empty without one."""
    for name in REQUEST_ID_HEADERS:
        if given := headers.get(name, ""):
            return given
    return ""


def parse_json(raw: bytes) -> Any:
    """A body's JSON.

    Raises:
        InvalidRequestError: it is none.
    """
    try:
        # As `loads` would, without asking which of Unicode's encodings an object is in.
        is_utf8 = raw[:1] == b"{" and raw[1:2] != b"\0"
        content = json.loads(raw.decode() if is_utf8 else raw)
        # Halves of characters are JSON, but no text; `loads` takes them in any encoding.
        if not is_utf8 or b"\\u" in raw:
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"the body is not valid JSON: {error}", code="bad_json"
        ) from error
