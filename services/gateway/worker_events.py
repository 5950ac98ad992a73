"""What workers tell the gateway about one request, as values, and the mailbox they arrive in.

Tests: tests/unit/gateway/test_worker_events.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import FinishReason, Refusal, Reservation, TokenLogprobs, WorkerId
from kvmesh.core.values import quick
from kvmesh.rpc.convert import finish_reason_from_proto, refusal_from_proto, reservation_from_proto
from kvmesh.rpc.convert_sampling import token_logprobs_from_proto
from kvmesh.v1.decode_service_pb2 import DecodeEvent, DecodeTokens
from kvmesh.v1.prefill_service_pb2 import PrefillEvent


@dataclass(frozen=True, slots=True)
class Accepted:
    """The prefill worker took the request."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker did not take the request; `by_prefill` says which of its sides."""

    refusal: Refusal
    by_prefill: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt is over: the worker lost it, or the connection to the worker broke."""

    refusal: Refusal
    by_prefill: bool = False


@quick
@dataclass(frozen=True, slots=True)
class FirstToken:
    """The prompt was computed; the token's position is the length of the sequence sent."""

    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The KV is complete at the decode worker."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks and a slot are held."""

    reservation: Reservation


@quick
@dataclass(frozen=True, slots=True)
class Started:
    """Blocks and a slot are held, and the prompt is being computed in them."""

    worker_id: WorkerId
    lease_ms: int


@quick
@dataclass(frozen=True, slots=True)
class Tokens:
    """Generated tokens; `first_position` counts from the start of the sequence."""

    first_position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    error: str = ""


WorkerEvent = Accepted | Refused | Failed | FirstToken | HandedOff | Reserved | Started | Tokens


def prefill_event(message: PrefillEvent) -> WorkerEvent:
    """A prefill worker's event.

    Raises:
        ProtocolError: the message holds no event that is known.
    """
    match message.WhichOneof("event"):
        case "accepted":
            return Accepted()
        case "rejected":
            return Refused(refusal_from_proto(message.rejected), by_prefill=True)
        case "first_token":
            first = message.first_token
            return FirstToken(
                first.token_id,
                token_logprobs_from_proto(first.logprobs) if first.HasField("logprobs") else None,
                finish_reason_from_proto(first.finish_reason),
                first.cached_tokens,
                tuple(token_logprobs_from_proto(entry) for entry in first.prompt_logprobs),
                first.error,
            )
        case "handed_off":
            return HandedOff()
        case "failed":
            return Failed(refusal_from_proto(message.failed), by_prefill=True)
        case _:
            raise ProtocolError("empty_event", f"prefill event of {message.request_id}")


def decode_event(message: DecodeEvent) -> WorkerEvent:
    """A decode worker's event.

    Raises:
        ProtocolError: the message holds no event that is known.
    """
    kind = message.WhichOneof("event")
    if message.HasField("prefill"):
        if kind == "reserved":
            return Started(WorkerId(message.reserved.worker_id), message.reserved.lease_ms)
        return prefill_event(message.prefill)
    match kind:
        case "reserved":
            return Reserved(reservation_from_proto(message.reserved))
        case "refused":
            return Refused(refusal_from_proto(message.refused))
        case "tokens":
            tokens = message.tokens
            return Tokens(
                tokens.first_position,
                tuple(tokens.token_ids),
                tuple(token_logprobs_from_proto(entry) for entry in tokens.logprobs),
                finish_reason_from_proto(tokens.finish_reason),
                tokens.error,
            )
        case "failed":
            return Failed(refusal_from_proto(message.failed))
        case _:
            raise ProtocolError("empty_event", f"decode event of {message.request_id}")


ShortWay = Callable[[DecodeTokens], bool]
"""Takes tokens as they come off the wire; False if they have to become an event after all."""


class Mailbox:
    """Events of one request from all the workers that it talks to, in order of arrival.

    Bounded by what the attempts open at one time can say.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[int, WorkerEvent]] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._short_way: tuple[int, ShortWay] | None = None

    def put(self, attempt: int, event: WorkerEvent) -> None:
        """Adds an event of an attempt."""
        self._events.append((attempt, event))
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def takes(self, message: Any) -> bool:
        """Takes a decode worker's event as it comes off the wire, if the short way has it."""
        return self.goes_short(message.attempt, message.tokens)

    def open_short_way(self, attempt: int, way: ShortWay) -> None:
        """Offers tokens of an attempt to `way` while nothing else waits here, until `take` ends."""
        self._short_way = (attempt, way)

    def goes_short(self, attempt: int, tokens: DecodeTokens) -> bool:
        """Whether the tokens were taken and need no event."""
        way = self._short_way
        return way is not None and way[0] == attempt and not self._events and way[1](tokens)

    async def take(self, timeout_s: float) -> tuple[int, WorkerEvent]:
        """The next event and its attempt.

        Raises:
            TimeoutError: nothing came within `timeout_s`.
        """
        try:
            if not self._events:
                await self._wait(timeout_s)
            return self._events.popleft()
        finally:
            self._short_way = None

    async def _wait(self, timeout_s: float) -> None:
        # By hand: a future and a timer cost a third of `asyncio.timeout` around an event.
        loop = asyncio.get_running_loop()
        self._arrival = loop.create_future()
        timer = loop.call_later(max(timeout_s, 0.0), self._expire, self._arrival)
        try:
            await self._arrival
        finally:
            timer.cancel()
            self._arrival = None

    @staticmethod
    def _expire(arrival: asyncio.Future[None]) -> None:
        if not arrival.done():
            arrival.set_exception(TimeoutError())
