"""Carries out role changes that the loops decided on: orders them, or only recommends them.

In both cases they are counted, logged and added to the decisions.
Tests: tests/unit/scheduler/test_planner.py, tests/unit/scheduler/test_groups.py.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection

from kvmesh.core.types import Role, WorkerId
from kvmesh.telemetry.logs import event_logger
from services.scheduler import metrics
from services.scheduler.decisions import DecisionLog

log = event_logger(__name__)

GiveRole = Callable[[WorkerId, Role, str], bool]
"""Orders a worker to take a role, with a reason for its log. False if it is not connected."""


class RoleChanges(enum.Enum):
    """The handling of a decision to change a role."""

    APPLY = "apply"
    RECOMMEND = "recommend"
    OFF = "off"


class RoleOrders:
    """Orders or recommends decided role changes."""

    def __init__(self, decisions: DecisionLog) -> None:
        self._decisions = decisions
        self._recommended: set[tuple[WorkerId, Role]] = set()
        self.give_role: GiveRole = lambda _worker, _role, _reason: False
        """Sends the order; set by the part that is connected to the workers."""

    @property
    def num_recommended(self) -> int:
        """Number of recommendations in force."""
        return len(self._recommended)

    def change(
        self, kind: str, worker_id: WorkerId, role: Role, reason: enum.Enum, *, may_order: bool
    ) -> bool:
        """Orders a worker to take a role, or recommends it. Returns True if it was ordered.

        A repeated recommendation is noted once.

        Args:
            kind: the loop that decided: `switch`, `ratio` or `reallocation`.
            may_order: False only recommends.
        """
        ordered = may_order and self.give_role(worker_id, role, reason.value)
        if ordered or (worker_id, role) not in self._recommended:
            self._note(kind, worker_id, role, reason.name.lower(), ordered)
        if not ordered:
            self._recommended.add((worker_id, role))
        return ordered

    def keep(self, workers: Collection[WorkerId]) -> None:
        """Forgets the recommendations for workers that are gone."""
        self._recommended = {each for each in self._recommended if each[0] in workers}

    def withdraw(
        self, workers: Collection[WorkerId], wanted: Collection[tuple[WorkerId, Role]]
    ) -> None:
        """Forgets the recommendations for some workers that are no longer wanted."""
        self._recommended = {
            each for each in self._recommended if each[0] not in workers or each in wanted
        }

    def _note(self, kind: str, worker_id: WorkerId, role: Role, reason: str, ordered: bool) -> None:
        outcome = "applied" if ordered else "recommended"
        metrics.ROLE_CHANGES.labels(kind, reason, outcome).inc()
        facts = {"worker_id": worker_id, "role": role.value, "outcome": outcome}
        self._decisions.add_fleet(kind, reason, **facts)
        log.info("role_change", kind=kind, reason=reason, **facts)
