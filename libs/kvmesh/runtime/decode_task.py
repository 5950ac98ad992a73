"""One request on the decode side of a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.core.types import RequestId
from kvmesh.engine.sequence import Sequence
from kvmesh.rpc.outbox import Outbox
from kvmesh.telemetry.tracing import Span
from kvmesh.v1 import decode_service_pb2 as pb

DecodeOutbox = Outbox[pb.DecodeEvent]


@dataclass(eq=False, slots=True)
class DecodeTask:
    """From its reservation to its last token.

    Attributes:
        arriving: blocks that the handoff writes, in order.
        reservation_id: None once decode has taken the blocks over.
        local_write: the engine of this worker computes the prompt right in the blocks.
        stop_prefill: ends the prompt that was started with the reservation.
    """

    outbox: DecodeOutbox
    request_id: RequestId
    attempt: int
    sequence: Sequence
    span: Span
    arriving: list[int]
    reservation_id: int | None = None
    local_write: int | None = None
    stop_prefill: Callable[[], None] | None = None
