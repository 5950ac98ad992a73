"""Reserve and offer in one message: what the decode side needs of the prefill side for it.

Tests: tests/integration/test_worker_start.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvmesh.core.types import Refusal, Reservation
from kvmesh.rpc.outbox import Outbox
from kvmesh.v1 import decode_service_pb2 as decode_pb
from kvmesh.v1 import prefill_service_pb2 as prefill_pb


class PrefillOutbox(Protocol):
    """Where events of the prefill side go: a gateway's stream."""

    def put(self, item: prefill_pb.PrefillEvent) -> None:
        """Queues an event."""
        ...


class StartedOutbox:
    """Prefill's events of one attempt, as events of the Decode stream that the attempt came on.

    Args:
        answer: has `reserved`; goes out with prefill's first event if that is `accepted`.
    """

    def __init__(
        self, answer: decode_pb.DecodeEvent, outbox: Outbox[decode_pb.DecodeEvent]
    ) -> None:
        self._request_id = answer.request_id
        self._attempt = answer.attempt
        self._answer: decode_pb.DecodeEvent | None = answer
        self._outbox = outbox

    def put(self, item: prefill_pb.PrefillEvent) -> None:
        """Queues an event; `handed_off` is none, since the KV is where it was computed."""
        kind = item.WhichOneof("event")
        if kind == "handed_off":
            return
        item.ClearField("request_id")
        item.ClearField("attempt")
        event = self._answer
        if event is None or kind != "accepted":
            event = decode_pb.DecodeEvent(request_id=self._request_id, attempt=self._attempt)
        event.prefill.CopyFrom(item)
        self._answer = None
        self._outbox.put(event)


class LocalPrefill(Protocol):
    """The prefill side of the same worker."""

    def turn_away(self) -> Refusal | None:
        """Why no prompt is taken now, counted as a rejected offer; None if one may be."""
        ...

    def start_reserved(
        self, message: decode_pb.DecodeReserve, reservation: Reservation, outbox: StartedOutbox
    ) -> Callable[[], None] | None:
        """Computes a prompt in what was just reserved for it, and answers.

        Returns:
            Ends it without a word; None if it was rejected.
        """
        ...
