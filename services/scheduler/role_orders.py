"""Role changes that the loops decided on: given to the worker or only recommended, and in both
cases counted, logged and kept among the decisions.

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
"""Orders a worker to take a role, with a reason for its log; False if it is not connected."""


class RoleChanges(enum.Enum):
    """What becomes of a decision to change a role."""

    APPLY = "apply"
    RECOMMEND = "recommend"
    OFF = "off"


class RoleOrders:
    """The way from a decision to the worker that it is about."""

    def __init__(self, decisions: DecisionLog) -> None:
        self._decisions = decisions
        self._recommended: set[tuple[WorkerId, Role]] = set()
        self.give_role: GiveRole = lambda _worker, _role, _reason: False
        """Set by whoever is connected to the workers."""

    @property
    def num_recommended(self) -> int:
        """Recommendations that stand."""
        return len(self._recommended)

    def change(
        self, kind: str, worker_id: WorkerId, role: Role, reason: enum.Enum, *, may_order: bool
    ) -> bool:
        """Orders a worker to take a role, or recommends it; True if it was ordered.

        What is recommended again and again is noted once.

        Args:
            kind: which loop decided: `switch`, `ratio` or `reallocation`.
            may_order: False recommends.
        """
        ordered = may_order and self.give_role(worker_id, role, reason.value)
        if ordered or (worker_id, role) not in self._recommended:
            self._note(kind, worker_id, role, reason.name.lower(), ordered)
        if not ordered:
            self._recommended.add((worker_id, role))
        return ordered

    def keep(self, workers: Collection[WorkerId]) -> None:
        """Forgets what was recommended for workers that are no more."""
        self._recommended = {each for each in self._recommended if each[0] in workers}

    def withdraw(
        self, workers: Collection[WorkerId], wanted: Collection[tuple[WorkerId, Role]]
    ) -> None:
        """Forgets what was recommended for some workers and is not wanted any more."""
        self._recommended = {
            each for each in self._recommended if each[0] not in workers or each in wanted
        }

    def _note(self, kind: str, worker_id: WorkerId, role: Role, reason: str, ordered: bool) -> None:
        outcome = "applied" if ordered else "recommended"
        metrics.ROLE_CHANGES.labels(kind, reason, outcome).inc()
        facts = {"worker_id": worker_id, "role": role.value, "outcome": outcome}
        self._decisions.add_fleet(kind, reason, **facts)
        log.info("role_change", kind=kind, reason=reason, **facts)
