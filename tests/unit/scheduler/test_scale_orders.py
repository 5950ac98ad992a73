from __future__ import annotations

from collections.abc import Collection

import pytest

from kvmesh.core.clock import ManualClock
from kvmesh.core.errors import ConfigError
from kvmesh.core.launch import LaunchError
from kvmesh.core.types import Role, WorkerId
from kvmesh.metadata.memory_store import MemoryFleetStore
from kvmesh.policy.role_switch import ScaleLimits
from services.scheduler.config import LauncherTarget, PlanningConfig, SchedulerConfig
from services.scheduler.role_orders import RoleChanges
from services.scheduler.scale_orders import BY_SLOTS
from services.scheduler.settings import scale_changes
from tests.unit.scheduler.test_planner import BUSY, Mesh, pairs

DECODE_BUSY = {"decode_running": 64, "blocks_free": 1, "memory_bandwidth_used": 1.0}


class Asked:
    """Takes a group's new size; it fails or refuses where it is told to."""

    def __init__(self, *, refuses: str = "", fails: bool = False) -> None:
        self.steps: list[tuple[list[str], Role, int]] = []
        self._refuses = refuses
        self._fails = fails

    async def scale(self, members: Collection[WorkerId], role: Role, step: int) -> str:
        if self._fails:
            raise LaunchError("the launcher does not answer")
        self.steps.append((sorted(members), role, step))
        return self._refuses


async def hold(mesh: Mesh, busy: bool, *, is_asked: bool = True) -> None:
    """The whole group is full, or idle, for longer than a signal takes."""
    for _ in range(int(ScaleLimits().hold_s) + 10):
        mesh.clock.advance(1.0)
        for name in ("p0", "p1", "d0", "d1"):
            load = (BUSY if name[0] == "p" else DECODE_BUSY) if busy else {"blocks_free": 512}
            mesh.report(name, **load)
        if busy and is_asked:
            await mesh.route("waits", waiting=60, waiting_reserved=30)
        await mesh.planner.cycle(may_order=False)


@pytest.mark.parametrize(("busy", "step"), [(True, 1), (False, -1)])
async def test_load_that_stays_asks_for_one_worker_more_or_less(busy: bool, step: int) -> None:
    mesh, asked = pairs(changes=RoleChanges.RECOMMEND), Asked()
    mesh.planner.scale_orders.scale_group = asked.scale
    await hold(mesh, busy)
    ((members, role, asked_step),) = asked.steps
    assert (members, asked_step) == (["d0", "d1", "p0", "p1"], step)
    (entry,) = mesh.fleet_log("scale")
    assert (entry["outcome"], entry["role"], entry["step"]) == ("applied", role.value, step)
    assert entry["reason"] == ("overload" if busy else "low_load")


@pytest.mark.parametrize(("busy", "outcome"), [(True, "recommended"), (False, "applied")])
async def test_one_of_several_that_nobody_asks_ends_idle_workers_and_starts_none(
    busy: bool, outcome: str
) -> None:
    asked = Asked()
    mesh = pairs(changes=RoleChanges.RECOMMEND, store=MemoryFleetStore(ManualClock()))
    mesh.planner.scale_orders.scale_group = asked.scale
    await hold(mesh, busy, is_asked=False)
    (entry,) = mesh.fleet_log("scale")
    assert entry["outcome"] == outcome
    assert len(asked.steps) == (outcome == "applied")


async def test_a_signal_alone_changes_no_size() -> None:
    mesh = pairs(changes=RoleChanges.RECOMMEND)
    await hold(mesh, busy=True)
    (entry,) = mesh.fleet_log("scale")
    assert entry["outcome"] == "recommended"


async def test_a_signal_may_follow_the_use_of_slots_instead() -> None:
    mesh, asked = pairs(changes=RoleChanges.RECOMMEND), Asked()
    mesh.planner.scale_orders.by = BY_SLOTS
    mesh.planner.scale_orders.scale_group = asked.scale
    await hold(mesh, busy=True)
    assert len(asked.steps) == 2, "after 30 and 60 s"


async def test_what_hindered_a_step_is_told() -> None:
    for asked, problem in (
        (Asked(refuses="the group is changing"), "the group is changing"),
        (Asked(fails=True), "the launcher does not answer"),
    ):
        mesh = pairs(changes=RoleChanges.RECOMMEND)
        mesh.planner.scale_orders.scale_group = asked.scale
        await hold(mesh, busy=True)
        (entry,) = mesh.fleet_log("scale")
        assert (entry["outcome"], entry["problem"]) == ("refused", problem)


async def test_off_says_nothing() -> None:
    mesh = pairs(changes=RoleChanges.RECOMMEND)
    mesh.planner.scale_orders.changes = RoleChanges.OFF
    await hold(mesh, busy=True)
    assert mesh.fleet_log("scale") == []


def config(target: str = "127.0.0.1:1", **planning: object) -> SchedulerConfig:
    made = PlanningConfig(**planning)  # type: ignore[arg-type]
    return SchedulerConfig(planning=made, launcher=LauncherTarget(target))


def test_signals_are_carried_out_where_somebody_can() -> None:
    assert scale_changes(config("")) is RoleChanges.RECOMMEND
    assert scale_changes(config(scale="apply", roles="recommend")) is RoleChanges.APPLY


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (config(scale="maybe"), r"planning\.scale 'maybe'"),
        (config(scale_by="luck"), r"planning\.scale_by 'luck'"),
        (config("", scale="apply"), "launcher.target"),
        (config(scale="apply", roles="off"), "planning.roles=apply"),
        (config(scale_min=3, scale_max=2), "scale_min is above"),
    ],
)
def test_what_makes_no_sense_ends_the_start(wrong: SchedulerConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        scale_changes(wrong)
