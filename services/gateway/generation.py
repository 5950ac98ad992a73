"""What a generation gives, piece by piece, and what is known of one that has begun.

Tests: tests/integration/test_gateway_http.py, tests/integration/test_gateway_short_life.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.core.errors import LostError
from kvmesh.core.types import FinishReason, Refusal, RoutePlan, TokenLogprobs, WorkerId
from kvmesh.core.values import quick
from services.gateway.errors import StageRefusedError
from services.gateway.mesh import GenerationRequest, Mesh, Placed
from services.gateway.phases import Phases


@quick
@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Tokens in order, each exactly once.

    Attributes:
        logprobs: one per token when asked for.
        finish_reason: set with the last token.
        cached_tokens: prompt tokens whose KV was there when the request came.
        placed: where the request runs now.
        prompt_logprobs: with the first tokens when asked for, of all prompt tokens but the first.
        num_told: of the tokens, the first ones that were told to a `Meter` as they came.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    cached_tokens: int
    placed: Placed
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_told: int = 0


class WorkLostError(LostError):
    """A worker lost the request.

    Attributes:
        worker_id: to be avoided.
        reason: short word for metrics.
    """

    def __init__(self, worker_id: WorkerId, reason: str, message: str) -> None:
        super().__init__(message)
        self.worker_id = worker_id
        self.reason = reason


@dataclass(slots=True)
class FirstTry:
    """What a request has tried before it searches for workers.

    Attributes:
        plan: not used yet, or that there is none; None if the scheduler has to be asked.
        refused: by this worker.
        last: what it said.
    """

    plan: RoutePlan | Refusal | None = None
    refused: WorkerId | None = None
    last: StageRefusedError | None = None


@dataclass(slots=True)
class Begun:
    """A request from when it came, whichever way it goes.

    Attributes:
        arrived_at, deadline: on the loop's clock; then it has run for too long.
        tokens: generated so far.
        first_try: None if the short way was not tried.
        num_attempts: numbers of attempts that workers may know.
        cached_tokens: None before the first token.
        lost: what ended the short way after a worker had taken the request.
    """

    arrived_at: float
    deadline: float
    phases: Phases
    tokens: list[int] = field(default_factory=list)
    first_try: FirstTry | None = None
    num_attempts: int = 0
    cached_tokens: int | None = None
    lost: WorkLostError | None = None


def place_until(mesh: Mesh, request: GenerationRequest, begun: Begun) -> float:
    """When the search for workers has to end, by what is known now."""
    patience_s = mesh.prefill_times.patience_s(len(request.prompt_ids), request.ttft_s)
    # It has waited for this process as long as this is late, and its first token may have to.
    late_s = min(mesh.crowd.lag_s + mesh.crowd.peak_lag_s, patience_s / 2)
    return min(begun.deadline, begun.arrived_at + patience_s - late_s)
