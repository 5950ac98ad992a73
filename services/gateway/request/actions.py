"""The states of an attempt, and the actions that it returns.

The rules are in `attempt.py`. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.core.types import Candidate, FinishReason, Placement, Refusal, TokenLogprobs, WorkerId
from kvmesh.core.values import quick
from services.gateway.wire.worker_events import FirstToken


class State(enum.Enum):
    """Where an attempt is."""

    IDLE = "nothing is open"
    RESERVING = "a decode worker was asked for blocks"
    HELD = "a decode worker holds blocks"
    OFFERING = "a prefill worker was shown the prompt and the reservation"
    STARTING = "one worker was asked for blocks and the prompt"
    PREFILL = "the prompt is being computed"
    HANDOFF = "the first token is here, the KV is on its way"
    DECODE = "the KV is where tokens are made"
    OVER = "there is an outcome"


class Outcome(enum.Enum):
    """How an attempt ended."""

    DONE = "the last token was delivered"
    MOVED = "a worker lost it; another attempt goes on"
    BROKEN = "what was asked for cannot be generated"
    LATE = "the request ran for too long"
    CANCELLED = "nobody wants it any more"


class Side(enum.Enum):
    """Which of a worker's two services."""

    PREFILL = "prefill"
    DECODE = "decode"


class Kind(enum.Enum):
    """What a worker is asked."""

    RESERVE = "blocks for the prompt"
    OFFER = "to compute the prompt and to send its KV"
    START = "both, at one worker"


class Limits(NamedTuple):
    """How long an attempt waits, in seconds.

    Attributes:
        answer_s: for yes or no.
        prefill_s: for the first token, and from there for the handoff.
        stall_s: for the next tokens.
    """

    answer_s: float
    prefill_s: float
    stall_s: float


@quick
@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a worker; its answers carry the number."""

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
    """A prefill worker computes the prompt, for blocks at a decode worker."""

    placement: Placement
    prefill_worker: WorkerId
    decode_worker: WorkerId


@quick
@dataclass(frozen=True, slots=True)
class Refuse:
    """Note that a worker said no, or nothing; without a worker, that a reservation was lost."""

    side: Side
    refusal: Refusal
    worker_id: WorkerId | None


@dataclass(frozen=True, slots=True)
class Exhausted:
    """No worker of the plan took it: ask again later."""


class Deliver(NamedTuple):
    """Send the next tokens to the client. A tuple, since one is made for each token.

    Attributes:
        finish_reason: with the last ones.
        first: with the first one of an attempt, what else its worker said.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish_reason: FinishReason | None
    first: FirstToken | None = None


@quick
@dataclass(frozen=True, slots=True)
class Decoding:
    """The reservation is in use: renew it no more."""

    number: int
    worker_id: WorkerId


@quick
@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing is open there any more."""

    side: Side
    number: int


@quick
@dataclass(frozen=True, slots=True)
class Cancel:
    """Have the worker end what is open there."""

    side: Side
    number: int


@quick
@dataclass(frozen=True, slots=True)
class Move:
    """Start again elsewhere: this worker lost it.

    Attributes:
        reason: a word for metrics.
        text: a sentence.
    """

    worker_id: WorkerId
    reason: str
    text: str


@quick
@dataclass(frozen=True, slots=True)
class Break:
    """Tell the client that what it asked for cannot be generated."""

    text: str


@dataclass(frozen=True, slots=True)
class Expire:
    """Tell the client that its request ran for too long."""


Action = (
    Ask
    | Hold
    | Taken
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
