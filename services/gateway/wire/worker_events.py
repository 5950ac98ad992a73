"""Converts workers' messages about one request to events.

Tests: tests/unit/gateway/wire/test_worker_events.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import (
    FinishReason,
    Refusal,
    RefusalReason,
    Reservation,
    TokenLogprobs,
    WorkerId,
)
from kvmesh.core.values import quick
from kvmesh.rpc.convert import finish_reason_from_proto, refusal_from_proto, reservation_from_proto
from kvmesh.rpc.convert_sampling import token_logprobs_from_proto
from kvmesh.v1.decode_service_pb2 import DecodeEvent
from kvmesh.v1.prefill_service_pb2 import PrefillEvent


@dataclass(frozen=True, slots=True)
class Accepted:
    """The prefill worker took the request."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker did not take the request. `by_prefill` tells which of its services refused."""

    refusal: Refusal
    by_prefill: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt is over: the worker lost the request, or the connection to the worker broke.

    `by_prefill` tells which of its services it was, or whose connection.
    """

    refusal: Refusal
    by_prefill: bool = False


@quick
@dataclass(frozen=True, slots=True)
class FirstToken:
    """The prompt was computed. The token's position is the length of the sequence that was sent."""

    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str = ""
    embedding: bytes = b""

    def at(self, position: int) -> Tokens:
        """The token at its position."""
        logprobs = () if self.logprobs is None else (self.logprobs,)
        return Tokens(position, (self.token_id,), logprobs, self.finish_reason, self.error)


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The KV is complete at the decode worker."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The prefill worker has come further with the prompt, or with sending its KV."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks and a slot are held."""

    reservation: Reservation


@quick
@dataclass(frozen=True, slots=True)
class Started:
    """Blocks and a slot are held, and the prompt is being computed in them."""

    lease_ms: int


class Tokens(NamedTuple):
    """Generated tokens.

    Attributes:
        first_position: position of the first token, from the start of the sequence.
        logprobs: one per token if the request asks for them.
        finish_reason: set with the last token.
        error: why no token can be generated, if the finish reason is ERROR.
    """

    first_position: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    error: str = ""

    def without(self, num_tokens: int) -> Tokens:
        """The same without the first `num_tokens`, which are known."""
        return self._replace(
            first_position=self.first_position + num_tokens,
            token_ids=self.token_ids[num_tokens:],
            logprobs=self.logprobs[num_tokens:],
        )


WorkerEvent = (
    Accepted | Refused | Failed | FirstToken | HandedOff | Progress | Reserved | Started | Tokens
)


def prefill_event(message: PrefillEvent) -> WorkerEvent:
    """Parses a prefill worker's event.

    Raises:
        ProtocolError: the message holds no known event.
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
                first.embedding,
            )
        case "handed_off":
            return HandedOff()
        case "progress":
            return Progress()
        case "failed":
            return Failed(refusal_from_proto(message.failed), by_prefill=True)
        case _:
            raise ProtocolError("empty_event", f"prefill event of {message.request_id}")


def decode_event(message: DecodeEvent, worker_id: WorkerId) -> WorkerEvent:
    """Parses a decode worker's event.

    Args:
        worker_id: the worker that was asked.

    Raises:
        ProtocolError: the message holds no known event.
    """
    kind = message.WhichOneof("event")
    if kind == "reserved" and message.reserved.worker_id != worker_id:
        # Another worker took over the address; the fleet view will catch up.
        text = f"{message.reserved.worker_id} answered for {worker_id}"
        return Refused(Refusal(RefusalReason.LOST, text))
    if message.HasField("prefill"):
        if kind == "reserved":
            return Started(message.reserved.lease_ms)
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
