"""Carries out scale signals: lets the launcher start or end a worker, or only says so.

Tests: tests/unit/scheduler/test_scale_orders.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from kvmesh.core.errors import KvMeshError
from kvmesh.core.types import Role, WorkerId
from kvmesh.policy.group_loops import RoleWork
from kvmesh.policy.groups import GroupKey
from kvmesh.policy.role_loop import RoleCycle
from kvmesh.policy.role_switch import ScaleSignal, scale_signal
from kvmesh.policy.slot_use import SlotMeter, slot_signal
from kvmesh.telemetry.logs import event_logger
from services.scheduler import metrics
from services.scheduler.decisions import DecisionLog
from services.scheduler.role_orders import RoleChanges

log = event_logger(__name__)

ScaleGroup = Callable[[Collection[WorkerId], Role, int], Awaitable[str]]
"""Gives the group of some workers so many more workers of a role, or fewer if the number is
negative. Returns why not; empty if it was done.
"""


BY_LOAD, BY_SLOTS = SCALE_BY = ("load", "slots")
"""Inputs of the scale signal: FlowKV's load scores, or slots in use as autoscalers see them."""


class ScaleOrders:
    """Signals of the planner on their way to the launcher.

    Attributes:
        changes: whether signals are carried out, recommended, or dropped.
        by: what signals follow, one of `SCALE_BY`.
        scale_group: asks for a group's new size; set where `changes` is to apply them.
    """

    def __init__(self, decisions: DecisionLog) -> None:
        self._decisions = decisions
        self._meters: dict[GroupKey, SlotMeter] = {}
        self.changes = RoleChanges.RECOMMEND
        self.by = BY_LOAD
        self.scale_group: ScaleGroup | None = None

    def keep(self, groups: Collection[GroupKey]) -> None:
        """Forgets the readings of groups that are gone."""
        self._meters = {key: each for key, each in self._meters.items() if key in groups}

    def signal(
        self, work: RoleWork, cycle: RoleCycle, before: ScaleSignal, now: float
    ) -> ScaleSignal:
        """The signal of this cycle of a group.

        Args:
            before: the last one; `STEADY` at first.
        """
        if self.by == BY_SLOTS:
            meter = self._meters.setdefault(work.group, SlotMeter())
            return slot_signal(meter.observe(work.members, now), before, now)
        return scale_signal(cycle.fleet, cycle.regime, before, now)

    async def follow(
        self,
        group: GroupKey,
        members: Collection[WorkerId],
        signal: ScaleSignal,
        leads: Callable[[], Awaitable[bool]],
    ) -> None:
        """Carries out a signal if it asks for a step.

        Args:
            members: the workers of the group.
            leads: whether this one of several schedulers gives orders now.
        """
        role = signal.role
        if self.changes is RoleChanges.OFF or signal.step == 0 or role is None:
            return
        labels = (group.model, group.cluster, group.scenario)
        metrics.SCALE_STEPS.labels(*labels, role.value, str(signal.step)).inc()
        outcome, problem = "recommended", ""
        if self.scale_group is not None and await leads():
            problem = await self._asked(self.scale_group, members, role, signal.step)
            outcome = "refused" if problem else "applied"
        facts = {"group": group.name, "role": role.value, "step": signal.step, "outcome": outcome}
        reason = signal.reason.name.lower()
        self._decisions.add_fleet("scale", reason, model=group.model, problem=problem, **facts)
        log.info("scale", reason=reason, problem=problem, **facts)

    async def _asked(
        self, scale_group: ScaleGroup, members: Collection[WorkerId], role: Role, step: int
    ) -> str:
        try:
            return await scale_group(members, role, step)
        except KvMeshError as error:  # no launcher or store answers: the next signal asks again
            return str(error)
