"""Parts of a scheduler, put together for tests."""

from __future__ import annotations

from kvmesh.core.clock import ManualClock
from kvmesh.core.types import Placement, Role, WorkerId
from kvmesh.metadata.store import FleetStore
from kvmesh.policy.composition import COMPOSITIONS, DEFAULT
from services.scheduler.config import PlanningConfig
from services.scheduler.decisions import DecisionLog
from services.scheduler.fleet import Fleet
from services.scheduler.knowledge import PrefixMatcher
from services.scheduler.planner import Planner
from services.scheduler.role_orders import RoleChanges
from services.scheduler.router import Router, RouterSettings

MATCH_TIMEOUT_S = 0.05


class Parts:
    """A router and a planner over one fleet and one clock that is moved by hand.

    Attributes:
        orders: roles that workers were ordered to take.
    """

    def __init__(
        self,
        fleet: Fleet | None = None,
        prefixes: PrefixMatcher | None = None,
        *,
        policy: str = DEFAULT,
        changes: RoleChanges = RoleChanges.APPLY,
        planning: PlanningConfig | None = None,
        store: FleetStore | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.fleet = Fleet(1e9) if fleet is None else fleet
        self.decisions = DecisionLog(self.clock, 100)
        self.orders: list[tuple[str, str]] = []
        composition = COMPOSITIONS[policy]
        self.planner = Planner(
            self.fleet,
            composition,
            planning or PlanningConfig(),
            self.decisions,
            self.clock,
            changes=changes,
            store=store,
        )
        self.planner.role_orders.give_role = self._order
        self._prefixes = prefixes
        self.use(RouterSettings(composition, Placement.AUTO, MATCH_TIMEOUT_S))

    def use(self, settings: RouterSettings) -> None:
        """Makes the router anew, with other settings."""
        self.settings = settings
        self.router = Router(
            self.fleet, settings, self._prefixes, self.clock, self.decisions, self.planner
        )

    def _order(self, worker_id: WorkerId, role: Role, reason: str) -> bool:
        assert reason
        self.orders.append((worker_id, role.value))
        return True
