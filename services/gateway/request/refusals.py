"""What was refused to one request while it looked for workers, and what its client is told of it.

Pure.
Tests: tests/unit/gateway/request/test_refusals.py, tests/integration/test_gateway_refusals.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from kvmesh.core.errors import InvalidRequestError
from kvmesh.core.types import Refusal, RefusalReason, RoutePlan, WorkerId
from kvmesh.policy.forwarding import still_refusing
from services.gateway.errors import Stage, StageRefusedError
from services.gateway.request.candidates import PERMANENT

_NOBODY_ASKED = Refusal(RefusalReason.DEADLINE, "the deadline passed before any worker was asked")


class Refusals:
    """Of one search. Times are seconds on any clock that only goes forward."""

    def __init__(self) -> None:
        self._last = StageRefusedError(_NOBODY_ASKED, Stage.GATEWAY)
        self._refused_at: dict[WorkerId, float] = {}
        self._unfit: dict[WorkerId, Refusal] = {}

    @property
    def workers(self) -> Collection[WorkerId]:
        """Who is to be avoided in the next plan."""
        return self._refused_at.keys()

    def note(self, stage: Stage, refusal: Refusal, worker_id: WorkerId | None, now: float) -> None:
        """Remembers a refusal; without a worker it is not one of a worker's."""
        deadline = RefusalReason.DEADLINE
        if refusal.reason is not deadline or self._last.refusal.reason is deadline:
            # That time ran out says less than what it was spent on.
            self._last = StageRefusedError(refusal, stage)
        if worker_id is not None:
            self._refused_at[worker_id] = now
            if refusal.reason in PERMANENT:
                self._unfit[worker_id] = refusal

    def fade(self, now: float) -> None:
        """Another plan is made: who refused long ago need not be avoided in those after it."""
        self._refused_at = still_refusing(self._refused_at, now)

    def check(self, plan: RoutePlan) -> None:
        """Checks that somebody of a plan may still take the request.

        Raises:
            InvalidRequestError: all of one side would refuse it for ever.
        """
        if not self._unfit:
            return
        for side in (plan.prefill, plan.decode):
            if side and all(candidate.worker_id in self._unfit for candidate in side):
                refusal = self._unfit[side[-1].worker_id]
                raise InvalidRequestError(
                    f"no worker can take this request: {refusal.message}",
                    code="context_length_exceeded"
                    if refusal.reason is RefusalReason.TOO_LONG
                    else "invalid_value",
                )

    def after(self, waited_s: float) -> StageRefusedError:
        """What the client is told when nobody took the request in time: the last word."""
        last = self._last.refusal
        text = f"no worker took the request within {round(waited_s * 1000)} ms; last answer:"
        return StageRefusedError(replace(last, message=f"{text} {last.message}"), self._last.stage)
