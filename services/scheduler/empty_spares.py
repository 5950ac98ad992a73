"""Workers without a model that wait for an assignment; they belong to no group and get no routes.

Tests: tests/unit/scheduler/test_empty_spares.py, tests/integration/test_empty_spare.py.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

from kvmesh.core.empty_spare import Assignment, EmptySpare
from kvmesh.core.types import WorkerId
from kvmesh.rpc.convert_worker import assignment_to_proto
from kvmesh.rpc.outbox import Outbox
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1.scheduler_service_pb2 import RegisterWorkerResponse
from services.scheduler import metrics

log = event_logger(__name__)


class EmptySpares:
    """The empty spares that are connected to this scheduler.

    Args:
        on_change: called after every change.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._spares: dict[WorkerId, tuple[EmptySpare, Outbox[RegisterWorkerResponse]]] = {}
        self._clusters: set[str] = set()

    def all(self) -> tuple[EmptySpare, ...]:
        """All, sorted by name; also those that load a model."""
        return tuple(self._spares[name][0] for name in sorted(self._spares))

    def find(self, worker_id: WorkerId) -> EmptySpare | None:
        """Returns one by name; None if it is not here."""
        found = self._spares.get(worker_id)
        return None if found is None else found[0]

    def note(self, spare: EmptySpare, orders: Outbox[RegisterWorkerResponse]) -> None:
        """Adds one, or what it reports about itself now."""
        if spare.worker_id not in self._spares:
            log.info("empty_spare", worker_id=spare.worker_id, cluster=spare.cluster)
        self._spares[spare.worker_id] = (spare, orders)
        self._changed()

    def forget(self, orders: Outbox[RegisterWorkerResponse]) -> None:
        """Removes the one whose connection this was: it has ended, or has its model."""
        gone = [name for name, (_, its) in self._spares.items() if its is orders]
        for name in gone:
            del self._spares[name]
        if gone:
            self._changed()

    def assign(self, worker_id: WorkerId, assignment: Assignment) -> bool:
        """Lets one load a model. Returns False if it is not here or loads one already."""
        found = self._spares.get(worker_id)
        if found is None or not found[0].is_waiting:
            return False
        spare, orders = found
        orders.put(RegisterWorkerResponse(assignment=assignment_to_proto(assignment)))
        self._spares[worker_id] = (dataclasses.replace(spare, assignment=assignment), orders)
        log.info(
            "empty_spare_assigned",
            worker_id=worker_id,
            role=assignment.role.value,
            scenario=assignment.scenario,
            model=assignment.model,
            reason=assignment.reason,
        )
        self._changed()
        return True

    def _changed(self) -> None:
        waiting = Counter(each.cluster for each in self.all() if each.is_waiting)
        self._clusters |= waiting.keys()
        for cluster in self._clusters:
            metrics.EMPTY_SPARES.labels(cluster).set(waiting[cluster])
        self._on_change()
