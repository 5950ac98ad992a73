"""One request on the decode side of a worker."""

from __future__ import annotations

import math
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
    """A request from its reservation to its last token.

    Attributes:
        arriving: blocks that the handoff writes, in order.
        reservation_id: None after decode has taken the blocks over.
        first_token_id: the token that follows the prompt, once its sender has committed.
        local_write: id of the write by this worker's own engine, if it computes the prompt in the
            blocks.
        stop_prefill: ends the prompt that was started with the reservation.
        tpot_s: longest mean time per token that its client accepts; infinite for none.
        itl_s: longest time between two tokens that its client accepts; infinite for none.
        decodes_since: when its KV was complete, in seconds on the worker's clock.
    """

    outbox: DecodeOutbox
    request_id: RequestId
    attempt: int
    sequence: Sequence
    span: Span
    arriving: list[int]
    reservation_id: int | None = None
    first_token_id: int | None = None
    local_write: int | None = None
    stop_prefill: Callable[[], None] | None = None
    tpot_s: float = math.inf
    itl_s: float = math.inf
    decodes_since: float | None = None

    @property
    def num_generated(self) -> int:
        """Number of tokens that were generated here."""
        return len(self.sequence.tokens) - len(self.sequence.spec.token_ids)
