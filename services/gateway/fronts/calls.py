"""Handles a chat or text completion from its body to its answer, for any HTTP server.

Tests: tests/integration/test_gateway_http.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvmesh.core.adapters import made_by
from kvmesh.core.errors import GoneError, InvalidRequestError
from kvmesh.core.types import Placement
from kvmesh.core.values import changed
from services.gateway.api.answers import (
    DONE,
    SEED_HEADER,
    SSE_HEADERS,
    Answer,
    EventSink,
    Whole,
)
from services.gateway.api.json_input import json_value
from services.gateway.api.openai import (
    ApiCall,
    Endpoint,
    chat_call,
    completion_call,
)
from services.gateway.api.schema import ChatBody, CompletionBody, parse_body
from services.gateway.entrance import Entrance, model_of
from services.gateway.frontend import Frontend, clean_request_id
from services.gateway.request.choice import Caller, Choice, Delivered, prompt_sum
from services.gateway.request.event_ids import HEADER, GivenId, parse_id
from services.gateway.request.journal import Entry
from services.gateway.request.kept_stream import Kept, delivered_of, owner_of
from services.gateway.request.stream_head import Head
from services.gateway.tenants.admission import Ticket

REQUEST_ID_HEADERS = ("x-request-id", "x-correlation-id", "request-id")
MAX_MS = 3_600_000

PATHS = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETION,
}

EVENT_STREAM = "text/event-stream"
_NONE = "no header"
_PLACEMENTS = {placement.value: placement for placement in Placement}


class Headers(Protocol):
    """A request's headers; names are looked up in lower case."""

    def get(self, name: str, default: str, /) -> str:
        """The first value of a header."""
        ...


class Exchange(EventSink, Protocol):
    """One HTTP request, and the sink of its answer.

    Attributes:
        arrived_at: when its last byte came to this machine, in seconds on the loop's clock; known
            once the body was read.
        request_id: for the answer's headers; an id in the body may replace it.
    """

    request_id: str
    arrived_at: float

    @property
    def headers(self) -> Headers:
        """The request's headers."""
        ...

    async def body(self) -> bytes:
        """The request's whole body."""
        ...


@dataclass(frozen=True, slots=True)
class _Asked:
    """A parsed call. For a resumed stream: the call with which the stream began.

    Attributes:
        frontend: the frontend of the call's model.
        created: seconds since the epoch.
        given: the client's position in the stream, if the call resumes one.
        delivered: the part that the client already has, if the call resumes a stream.
    """

    endpoint: Endpoint
    frontend: Frontend
    call: ApiCall
    caller: Caller
    body: bytes
    created: int
    given: GivenId | None = None
    delivered: Delivered | None = None


class Calls:
    """Answers chat and text completions."""

    def __init__(self, entrance: Entrance) -> None:
        self._entrance = entrance

    async def answer(self, endpoint: Endpoint, exchange: Exchange) -> Whole | None:
        """Answers a call.

        Returns:
            The answer; None if it was sent to the exchange as events.

        Raises:
            KvMeshError: the call failed before anything was sent.
        """
        headers = exchange.headers
        async with self._entrance.admit(headers.get("authorization", "")) as ticket:
            body = await exchange.body()
            await self._entrance.turn(exchange.arrived_at, ttft_ms_of(headers))
            if last := headers.get(HEADER, ""):
                return await self._go_on(endpoint, parse_id(last), body, exchange, ticket)
            return await self._answer(self._asked(endpoint, body, exchange, ticket), exchange)

    async def _go_on(
        self, endpoint: Endpoint, given: GivenId, body: bytes, exchange: Exchange, ticket: Ticket
    ) -> Whole | None:
        metrics = self._entrance.metrics
        caller = caller_of(exchange.headers, exchange.arrived_at, exchange.request_id, ticket)
        try:
            kept = await self._entrance.kept(given, endpoint.value, caller, body)
            asked = self._asked_again(endpoint, given, kept, exchange, caller)
            whole: Whole | None = None
            if given.is_over:
                exchange.begin({**SSE_HEADERS, SEED_HEADER: str(kept.head.seed)}, DONE)
                exchange.end(b"")
                await exchange.sent()
            else:
                whole = await self._answer(asked, exchange)
        except GoneError:
            metrics.resumed("gone")
            raise
        metrics.resumed("resumed")
        return whole

    async def _answer(self, asked: _Asked, exchange: Exchange) -> Whole | None:
        frontend = asked.frontend
        choices = await frontend.prepare(asked.call, asked.caller, asked.delivered)
        entry: Entry | None = None
        try:
            answer = Answer(frontend, choices, exchange.request_id, asked.created)
            if not asked.call.stream:
                return await answer.whole()
            if wants_ids(exchange.headers):
                entry = self._entry(asked, choices)
            await answer.stream(exchange, entry)
            return None
        finally:
            if entry is not None:
                entry.close()

    def _asked(self, endpoint: Endpoint, body: bytes, exchange: Exchange, ticket: Ticket) -> _Asked:
        headers = exchange.headers
        frontend, call = self._call(endpoint, parse_json(body))
        if call.request_id and not given_request_id(headers):
            exchange.request_id = clean_request_id(call.request_id)
        caller = caller_of(headers, exchange.arrived_at, exchange.request_id, ticket)
        return _Asked(endpoint, frontend, call, caller, body, int(time.time()))

    def _asked_again(
        self, endpoint: Endpoint, given: GivenId, kept: Kept, exchange: Exchange, caller: Caller
    ) -> _Asked:
        """Returns the call of a stream that a client resumes with `Last-Event-ID`.

        Raises:
            GoneError: no gateway can resume it.
        """
        head = kept.head
        exchange.request_id = clean_request_id(head.request_id)  # a client may have forged it
        caller = changed(
            caller,
            request_id=exchange.request_id,
            scenario=head.scenario,
            placement=Placement(head.placement),
        )
        frontend, call = self._call(endpoint, parse_json(head.body))
        delivered, body = delivered_of(given, kept), head.body
        return _Asked(endpoint, frontend, call, caller, body, head.created, given, delivered)

    def _entry(self, asked: _Asked, choices: Sequence[Choice]) -> Entry | None:
        """The stream's entry in the journal; None without a journal."""
        journal, caller = self._entrance.journal, asked.caller
        if journal is None:
            return None
        head = Head(
            kind=asked.endpoint.value,
            owner=owner_of(caller.ticket),
            request_id=caller.request_id,
            created=asked.created,
            seed=choices[0].call.seed or 0,
            prompt_sum=prompt_sum(choices),
            checkpoints=tuple(
                made_by(each.request.checkpoint, each.request.adapter) for each in choices
            ),
            scenario=caller.scenario,
            placement=caller.placement.value,
            body=asked.body,
        )
        return journal.open(head, choices, asked.given)

    def _call(self, endpoint: Endpoint, content: Any) -> tuple[Frontend, ApiCall]:
        frontend = self._entrance.of(model_of(content))
        defaults = frontend.tokenizer.sampling_defaults
        if endpoint is Endpoint.CHAT:
            chat = frontend.tokenizer.chat
            body = parse_body(ChatBody, content)
            families = (chat.tool_family, chat.reasoning_family)
            return frontend, chat_call(body, frontend.limits, defaults, *families)
        text = parse_body(CompletionBody, content)
        return frontend, completion_call(text, frontend.limits, defaults)


def caller_of(headers: Headers, arrived_at: float, request_id: str, ticket: Ticket) -> Caller:
    """Builds the caller from the request's headers.

    Raises:
        InvalidRequestError: a header has a value that is not allowed.
    """
    return Caller(
        arrived_at=arrived_at,
        request_id=request_id,
        scenario=parse_scenario(headers.get("x-kvmesh-scenario", "")),
        placement=parse_placement(headers.get("x-kvmesh-placement", "")),
        ttft_ms=ttft_ms_of(headers),
        tpot_ms=milliseconds_of(headers, "x-slo-tpot-ms"),
        itl_ms=milliseconds_of(headers, "x-slo-itl-ms"),
        traceparent=headers.get("traceparent", ""),
        ticket=ticket,
    )


def parse_scenario(text: str) -> str:
    """The scenario header's value.

    Raises:
        InvalidRequestError: it is not UTF-8; servers decode such bytes to lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("x-kvmesh-scenario: not UTF-8", "x-kvmesh-scenario") from error
    return text


def parse_placement(text: str) -> Placement:
    """The placement header's value; empty lets the scheduler decide.

    Raises:
        InvalidRequestError: the word is no placement.
    """
    if text and text not in _PLACEMENTS:
        allowed = ", ".join(sorted(_PLACEMENTS))
        raise InvalidRequestError(
            f"x-kvmesh-placement: {text!r}; allowed: {allowed}", "x-kvmesh-placement"
        )
    return _PLACEMENTS.get(text, Placement.AUTO)


def ttft_ms_of(headers: Headers) -> int:
    """The deadline header's value; 0 without one.

    Raises:
        InvalidRequestError: not a whole number of milliseconds in range.
    """
    return milliseconds_of(headers, "x-slo-ttft-ms")


def milliseconds_of(headers: Headers, name: str) -> int:
    """The value of a header that holds a time in milliseconds; 0 without one.

    Raises:
        InvalidRequestError: not a whole number of milliseconds in range.
    """
    text = headers.get(name, "")
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= MAX_MS):
        raise InvalidRequestError(f"{name}: {text!r}; allowed: 1 to {MAX_MS} (milliseconds)", name)
    return int(text)


def given_request_id(headers: Headers) -> str:
    """The caller's id for the request; empty without one."""
    for name in REQUEST_ID_HEADERS:
        if given := headers.get(name, ""):
            return given
    return ""


def wants_ids(headers: Headers) -> bool:
    """Whether a client reads more of an event than its data, and so may resume its stream.

    Such clients accept event streams by that name, as the standard of these wants, or have an id
    of one already, if only an empty one. Others read `data: ` alone and fail at an id, as
    `vllm bench serve` does.
    """
    return EVENT_STREAM in headers.get("accept", "") or headers.get(HEADER, _NONE) is not _NONE


def parse_json(raw: bytes) -> Any:
    """A body's JSON value.

    Raises:
        InvalidRequestError: the body is not valid JSON, or nested too deep.
    """
    try:
        return json_value(raw.decode(json.detect_encoding(raw)))
    except ValueError as error:
        raise InvalidRequestError(
            f"the body cannot be read as JSON: {error}", code="bad_json"
        ) from error
