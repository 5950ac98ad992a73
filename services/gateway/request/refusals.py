"""The refusals that one search got, and the refusal that its client gets. Pure.

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
    """The refusals of one search. Times are seconds on any clock that never goes back."""

    def __init__(self) -> None:
        self._last = StageRefusedError(_NOBODY_ASKED, Stage.GATEWAY)
        self._refused_at: dict[WorkerId, float] = {}
        self._unfit: dict[WorkerId, Refusal] = {}

    @property
    def workers(self) -> Collection[WorkerId]:
        """Workers that the next plan should avoid."""
        return self._refused_at.keys()

    def note(self, stage: Stage, refusal: Refusal, worker_id: WorkerId | None, now: float) -> None:
        """Remembers a refusal.

        Args:
            worker_id: the worker that refused; None for the scheduler or this gateway.
        """
        deadline = RefusalReason.DEADLINE
        if refusal.reason is not deadline or self._last.refusal.reason is deadline:
            # The reason why time ran out tells the client more than the fact that it did.
            self._last = StageRefusedError(refusal, stage)
        if worker_id is not None:
            self._refused_at[worker_id] = now
            if refusal.reason in PERMANENT:
                self._unfit[worker_id] = refusal

    def fade(self, now: float) -> None:
        """Forgets old refusals, so that later plans no longer avoid their workers."""
        self._refused_at = still_refusing(self._refused_at, now)

    def check(self, plan: RoutePlan) -> None:
        """Checks that a plan has workers that may still take the request.

        Raises:
            InvalidRequestError: all its prefill or all its decode workers refused permanently.
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
        """The client's refusal when no worker took the request in time: the last one noted."""
        last = self._last.refusal
        text = f"no worker took the request within {round(waited_s * 1000)} ms; last answer:"
        return StageRefusedError(replace(last, message=f"{text} {last.message}"), self._last.stage)
