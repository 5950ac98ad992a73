"""Reserve and offer in one message: the interface of the prefill side for the decode side.

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
    """Takes events of the prefill side: a gateway's stream."""

    def put(self, item: prefill_pb.PrefillEvent) -> None:
        """Queues an event."""
        ...


class StartedOutbox:
    """Sends the prefill events of one attempt on the Decode stream of that attempt.

    Args:
        answer: has `reserved`; it is sent with prefill's first event if that is `accepted`.
    """

    def __init__(
        self, answer: decode_pb.DecodeEvent, outbox: Outbox[decode_pb.DecodeEvent]
    ) -> None:
        self._request_id = answer.request_id
        self._attempt = answer.attempt
        self._answer: decode_pb.DecodeEvent | None = answer
        self._outbox = outbox

    def put(self, item: prefill_pb.PrefillEvent) -> None:
        """Queues an event. Drops `handed_off`, since the KV stays where it was computed."""
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
        """Why no prompt is accepted now, counted as a rejected offer; None if a slot is free."""
        ...

    def start_reserved(
        self, message: decode_pb.DecodeReserve, reservation: Reservation, outbox: StartedOutbox
    ) -> Callable[[], None] | None:
        """Computes a prompt in the blocks just reserved for it, and answers.

        Returns:
            A function that cancels the prompt without an event; None if it was rejected.
        """
        ...
