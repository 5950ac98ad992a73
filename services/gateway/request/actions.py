"""States, outcomes and actions of an attempt. The transitions are in `attempt.py`. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.core.types import Candidate, FinishReason, Placement, Refusal, TokenLogprobs, WorkerId
from kvmesh.core.values import quick
from services.gateway.wire.worker_events import FirstToken


class State(enum.Enum):
    """The state of an attempt."""

    IDLE = "no worker is asked; a decode worker may hold blocks"
    ASKING = "a worker has not answered a question yet"
    PREFILL = "the prompt is being computed"
    HANDOFF = "the first token has arrived, the KV is in transfer"
    DECODE = "the decode worker has the KV and generates"
    OVER = "the attempt has an outcome"


class Outcome(enum.Enum):
    """How an attempt ended."""

    DONE = "the last token was delivered"
    MOVED = "a worker lost the request; another attempt continues it"
    BROKEN = "no token fits the structure that was asked for"
    LATE = "the request ran for too long"
    CANCELLED = "its client left, or the answer ended at a stop string"


class Side(enum.Enum):
    """One of a worker's two services."""

    PREFILL = "prefill"
    DECODE = "decode"


class Kind(enum.Enum):
    """The kind of a question to a worker."""

    RESERVE = "to reserve blocks for the prompt"
    OFFER = "to compute the prompt and to send its KV"
    START = "to do both"


class Limits(NamedTuple):
    """Timeouts of an attempt, in seconds.

    Attributes:
        answer_s: wait for the answer to a question.
        prefill_s: wait for the first token, and again for the handoff after it.
        stall_s: wait for the next tokens.
    """

    answer_s: float
    prefill_s: float
    stall_s: float


@quick
@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a worker. The worker's answers carry the question's number."""

    kind: Kind
    number: int
    candidate: Candidate

    @property
    def side(self) -> Side:
        """The service that is asked."""
        return Side.PREFILL if self.kind is Kind.OFFER else Side.DECODE

    @property
    def worker_id(self) -> WorkerId:
        """The worker that is asked."""
        return self.candidate.worker_id


@quick
@dataclass(frozen=True, slots=True)
class Hold:
    """Renew the reservation until `Decoding`, `Forget` or `Cancel`."""

    number: int
    worker_id: WorkerId
    lease_ms: int


@quick
@dataclass(frozen=True, slots=True)
class Taken:
    """A prefill worker accepted the prompt; it sends the KV to blocks of the decode worker."""

    placement: Placement
    prefill_worker: WorkerId
    decode_worker: WorkerId


@quick
@dataclass(frozen=True, slots=True)
class Unanswered:
    """Note that a worker did not answer the question that it was asked at `asked_at`, in time."""

    candidate: Candidate
    asked_at: float


@quick
@dataclass(frozen=True, slots=True)
class Refuse:
    """Note a worker to avoid: it refused, did not answer, or lost its reservation."""

    side: Side
    refusal: Refusal
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Exhausted:
    """No worker of the plan took the request: ask for another plan later."""


class Deliver(NamedTuple):
    """Send the next tokens to the client. A tuple, since one is made for each token.

    Attributes:
        finish_reason: set with the last tokens.
        first: the worker's event, set with the first token of an attempt.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish_reason: FinishReason | None
    first: FirstToken | None = None


@quick
@dataclass(frozen=True, slots=True)
class Decoding:
    """The decode worker now uses its reservation for decoding: stop renewing it."""

    number: int
    worker_id: WorkerId


@quick
@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing is open at the worker any more: drop the question."""

    side: Side
    number: int


@quick
@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell the worker to end the question, reservation or generation that is open there."""

    side: Side
    number: int


@quick
@dataclass(frozen=True, slots=True)
class Move:
    """Start another attempt without this worker, which lost the request.

    Attributes:
        reason: a word for metrics.
        text: a sentence for logs and errors.
    """

    worker_id: WorkerId
    reason: str
    text: str


@quick
@dataclass(frozen=True, slots=True)
class Break:
    """Tell the client that no token fits the structure that it asked for."""

    text: str


@dataclass(frozen=True, slots=True)
class Expire:
    """Tell the client that its request ran for too long."""


Action = (
    Ask
    | Hold
    | Taken
    | Unanswered
    | Refuse
    | Exhausted
    | Deliver
    | Decoding
    | Forget
    | Cancel
    | Move
    | Break
    | Expire
)
Actions = Sequence[Action]
