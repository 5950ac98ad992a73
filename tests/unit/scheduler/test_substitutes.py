from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Mapping

import pytest

from kvmesh.core.empty_spare import Origin
from kvmesh.core.health import Health
from kvmesh.core.launch import Launched, Launcher, LaunchError, LaunchSpec
from kvmesh.core.types import Role, WorkerId, WorkerInfo, WorkerLoad
from kvmesh.policy.health import REST_S, HealthReason, Verdict
from services.scheduler.empty_spares import EmptySpares
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Membership
from services.scheduler.role_orders import RoleChanges
from services.scheduler.substitutes import FORGET_S, MAX_CHOICES, Substitutes
from tests.unit.policy.fleet_examples import worker_info
from tests.unit.scheduler.parts import Parts

START_S = 4.0
IDLE = WorkerLoad(blocks_free=512)


class Starter:
    """A launcher that writes down what it is told; it fails where it is told to."""

    def __init__(
        self, kept: Mapping[str, LaunchSpec], *, fails: bool = False, renames: bool = False
    ) -> None:
        self.renames = renames
        self.kept = {WorkerId(name): spec for name, spec in kept.items()}
        self.fails = fails
        self._numbers = itertools.count(1)
        self.told: list[str] = []

    async def start(self, spec: LaunchSpec) -> WorkerId:
        if self.fails:
            raise LaunchError("no room")
        name = WorkerId(f"new-{next(self._numbers)}")
        self.kept[name] = spec
        self.told.append(f"start {name} {spec.checkpoint}")
        return name

    async def stop(self, worker_id: WorkerId) -> None:
        del self.kept[worker_id]
        self.told.append(f"stop {worker_id}")

    async def restart(self, worker_id: WorkerId) -> WorkerId:
        if worker_id not in self.kept:
            raise LaunchError(f"{worker_id} is not kept here")
        self.told.append(f"restart {worker_id}")
        name = WorkerId(f"{worker_id}-again") if self.renames else worker_id
        self.kept[name] = self.kept.pop(worker_id)
        return name

    async def list(self) -> list[Launched]:
        return [Launched(name, spec) for name, spec in self.kept.items()]


class Places(Parts):
    """A fleet whose workers carry orders out at once, unless they are deaf."""

    def __init__(
        self,
        roles: Mapping[str, Role],
        changes: RoleChanges = RoleChanges.APPLY,
        launcher: Launcher | None = None,
    ) -> None:
        super().__init__()
        feed = FleetFeed(self.fleet)
        self.empties = EmptySpares()
        self.substitutes = Substitutes(
            self.fleet,
            feed,
            self.planner,
            self.decisions,
            self.clock,
            self.empties,
            changes=changes,
            launcher=launcher,
        )
        self.substitutes.give_place = self._give
        self.members: dict[str, Membership] = {}
        self.infos: dict[str, WorkerInfo] = {}
        self.told: list[tuple[str, str]] = []
        self.deaf: set[str] = set()
        for name, role in roles.items():
            self.come(name, role)

    def come(self, name: str, role: Role, incarnation: int = 1) -> None:
        self.take(worker_info(name, role, incarnation=incarnation, origin=Origin(start_s=START_S)))

    def take(self, info: WorkerInfo, load: WorkerLoad = IDLE) -> None:
        member = self.fleet.register(info, self.clock.now())
        assert isinstance(member, Membership)
        self.members[info.worker_id], self.infos[info.worker_id] = member, info
        assert self.fleet.report(member, load, self.clock.now())

    def _give(self, worker_id: WorkerId, role: Role, scenario: str, reason: str) -> bool:
        assert reason
        self.told.append((worker_id, role.value))
        if worker_id not in self.deaf:
            self.take(dataclasses.replace(self.infos[worker_id], role=role, scenario=scenario))
        return True

    def lose(self, name: str) -> None:
        assert self.fleet.leave(self.members.pop(name), is_lost=True)

    async def look(self, after_s: float = 0.1) -> None:
        self.clock.advance(after_s)
        await self.substitutes.look()

    def roles(self) -> dict[str, str]:
        return {each.info.worker_id: each.info.role.value for each in self.fleet.workers()}

    def steps(self) -> list[str]:
        kept = self.decisions.as_json()["fleet"]
        return [each["reason"] for each in reversed(kept) if each["kind"] == "substitute"]


TWO = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}


async def test_a_spare_takes_the_place_and_who_comes_back_is_the_spare() -> None:
    parts = Places(TWO | {"s0": Role.SPARE, "s1": Role.SPARE})
    await parts.look()
    parts.lose("d0")
    for _ in range(3):
        await parts.look()
    assert parts.told == [("s0", "decode")], "one, and once"
    parts.come("d0", Role.DECODE, incarnation=2)
    await parts.look(START_S)
    await parts.look()
    wanted = {**{name: role.value for name, role in TWO.items()}, "s0": "decode", "s1": "spare"}
    assert parts.roles() == wanted | {"d0": "spare"}
    assert parts.steps() == ["spare", "filled", "returned"]


async def test_who_was_only_cut_off_keeps_its_place_and_its_kv() -> None:
    parts = Places(TWO | {"s0": Role.SPARE})
    await parts.look()
    parts.lose("d0")
    await parts.look()
    await parts.look()
    parts.come("d0", Role.DECODE)
    await parts.look()
    assert parts.roles()["d0"] == "decode"
    assert parts.roles()["s0"] == "spare"


async def test_who_leaves_in_good_order_is_not_replaced() -> None:
    parts = Places(TWO | {"s0": Role.SPARE})
    assert parts.fleet.leave(parts.members["d0"])
    await parts.look()
    assert parts.told == []


async def test_an_idle_prefill_worker_helps_until_the_lost_one_is_back() -> None:
    parts = Places(TWO)
    await parts.look()
    parts.take(parts.infos["d1"], WorkerLoad(blocks_free=0))
    parts.lose("d0")
    await parts.look()
    await parts.look()
    assert parts.told == [("p0", "decode")]
    parts.come("d0", Role.DECODE, incarnation=2)
    await parts.look(START_S)
    assert parts.roles() == {name: role.value for name, role in TWO.items()}


async def test_who_does_not_come_in_time_is_not_waited_for() -> None:
    parts = Places(TWO | {"s0": Role.SPARE, "s1": Role.SPARE})
    parts.deaf.add("s0")
    await parts.look()
    parts.lose("d0")
    await parts.look()
    await parts.look(10.0)
    assert parts.told == [("s0", "decode"), ("s1", "decode")]


async def test_a_substitute_that_is_lost_is_replaced_for_the_same_place() -> None:
    parts = Places(TWO | {"s0": Role.SPARE, "s1": Role.SPARE})
    await parts.look()
    parts.lose("d0")
    await parts.look()
    await parts.look()
    parts.lose("s0")
    await parts.look()
    await parts.look()
    assert parts.told == [("s0", "decode"), ("s1", "decode")]
    parts.come("s0", Role.SPARE, incarnation=2)
    parts.come("d0", Role.DECODE, incarnation=2)
    await parts.look()
    roles = parts.roles()
    assert [roles[name] for name in ("d0", "d1", "s0", "s1")] == [
        "spare",
        "decode",
        "spare",
        "decode",
    ]


async def test_an_ejected_worker_is_replaced_until_it_is_well() -> None:
    parts = Places(TWO | {"s0": Role.SPARE})
    await parts.look()
    parts.fleet.judge({WorkerId("d0"): Verdict(Health.DEAD, HealthReason.HANGS)})
    await parts.look()
    await parts.look()
    assert parts.told == [("s0", "decode")]
    parts.fleet.judge({WorkerId("d0"): Verdict(Health.SUSPECT, HealthReason.PROBATION)})
    await parts.look()
    assert parts.roles()["s0"] == "spare"
    assert parts.roles()["d0"] == "decode"


async def test_a_spare_by_its_configuration_takes_its_last_place_where_nobody_else_did() -> None:
    parts = Places({"d0": Role.SPARE})
    parts.take(dataclasses.replace(parts.infos["d0"], role=Role.DECODE))
    parts.lose("d0")
    await parts.look()
    parts.come("d0", Role.SPARE, incarnation=2)
    await parts.look()
    assert parts.roles() == {"d0": "decode"}


async def test_recommended_substitutes_are_noted_once_and_not_ordered() -> None:
    parts = Places(TWO | {"s0": Role.SPARE}, RoleChanges.RECOMMEND)
    await parts.look()
    parts.lose("d0")
    for _ in range(3):
        await parts.look(10.0)
    assert parts.told == []
    assert parts.steps() == ["spare"]


async def test_nobody_is_awaited_for_ever() -> None:
    parts = Places({"d0": Role.DECODE, "s0": Role.SPARE})
    await parts.look()
    parts.lose("d0")
    await parts.look()
    await parts.look()
    await parts.look(2 * FORGET_S)
    parts.come("d0", Role.DECODE, incarnation=2)
    await parts.look()
    assert parts.roles() == {"d0": "decode", "s0": "decode"}


async def test_of_many_that_are_lost_at_once_some_are_looked_at_in_each_turn() -> None:
    parts = Places(
        {f"d{number}": Role.DECODE for number in range(40)}
        | {f"s{number}": Role.SPARE for number in range(30)}
        | {"p0": Role.PREFILL}
    )
    await parts.look()
    for number in range(2 * MAX_CHOICES + 1):
        parts.lose(f"d{number}")
    await parts.look()
    assert len(parts.told) == MAX_CHOICES
    for _ in range(2):
        await parts.look()
    assert len({name for name, _ in parts.told}) == len(parts.told) == 2 * MAX_CHOICES + 1


HANGS = Verdict(Health.DEAD, HealthReason.HANGS)


async def test_where_nobody_is_left_to_take_the_place_one_process_is_started() -> None:
    starter = Starter({"d0": LaunchSpec(Role.DECODE, checkpoint="/m/one")})
    parts = Places({"p0": Role.PREFILL, "d0": Role.DECODE}, launcher=starter)
    await parts.look()
    parts.lose("d0")
    await parts.look()
    assert parts.steps() == ["return"], "which costs no more than a new process"
    for _ in range(3):
        await parts.look(3 * START_S)
    assert starter.told == ["start new-1 /m/one"], "with the checkpoint of the one that is lost"
    parts.come("new-1", Role.DECODE)
    await parts.look()
    parts.come("d0", Role.DECODE, incarnation=2)
    await parts.look()
    await asyncio.sleep(0)
    assert starter.told[1:] == ["stop d0"], "it holds no KV"
    assert parts.steps() == ["return", "process", "filled", "returned"]


async def test_a_process_that_does_not_come_is_stopped_and_tried_no_more_than_three_times() -> None:
    starter = Starter({})
    parts = Places({"p0": Role.PREFILL, "d0": Role.DECODE}, launcher=starter)
    await parts.look()
    parts.lose("d0")
    for _ in range(20):
        await parts.look(4 * START_S)
        await asyncio.sleep(0)
    words = [each.split()[0] for each in starter.told]
    assert sorted(words) == ["start"] * 3 + ["stop"] * 3


async def test_a_launcher_that_cannot_is_asked_no_more_than_three_times() -> None:
    parts = Places({"p0": Role.PREFILL, "d0": Role.DECODE}, launcher=Starter({}, fails=True))
    await parts.look()
    parts.lose("d0")
    for _ in range(20):
        await parts.look(4 * START_S)
    assert parts.steps() == ["return"]


async def test_a_worker_that_hangs_is_killed_when_somebody_else_has_its_place() -> None:
    starter = Starter({"d0": LaunchSpec(Role.DECODE)})
    parts = Places(TWO | {"s0": Role.SPARE}, launcher=starter)
    await parts.look()
    parts.fleet.judge({WorkerId("d0"): HANGS})
    await parts.look()
    assert starter.told == []
    for _ in range(3):
        await parts.look()
    assert starter.told == ["restart d0"], "once"
    parts.lose("d0")
    parts.come("d0", Role.DECODE, incarnation=2)
    await parts.look(START_S)
    await parts.look()
    assert parts.roles()["d0"] == "spare"
    assert parts.steps() == ["spare", "filled", "ended", "returned"]


@pytest.mark.parametrize("has_spare", [True, False])
async def test_the_next_life_of_a_worker_that_hangs_may_have_another_name(has_spare: bool) -> None:
    starter = Starter({"d0": LaunchSpec(Role.DECODE)}, renames=True)
    spare = {"s0": Role.SPARE} if has_spare else {}
    parts = Places({"p0": Role.PREFILL, "d0": Role.DECODE} | spare, launcher=starter)
    await parts.look()
    parts.fleet.judge({WorkerId("d0"): HANGS})
    for _ in range(4):
        await parts.look()
    assert starter.told == ["restart d0"]
    parts.lose("d0")  # its connection broke with its process
    for _ in range(3):
        await parts.look()
    parts.come("d0-again", Role.DECODE)
    await parts.look()
    await parts.look()
    assert starter.told == ["restart d0"], "nobody else was started"
    assert not await parts.substitutes.look()
    expected = ["spare", "filled", "ended"] if has_spare else ["return", "ended"]
    assert parts.steps() == [*expected, "returned"]
    assert sorted(parts.roles()) == sorted(["p0", "d0-again", *spare])


async def test_a_worker_that_hangs_is_killed_at_once_where_its_next_life_is_soonest() -> None:
    starter = Starter({"d0": LaunchSpec(Role.DECODE)})
    parts = Places({"p0": Role.PREFILL, "d0": Role.DECODE}, launcher=starter)
    await parts.look()
    parts.fleet.judge({WorkerId("d0"): HANGS})
    for _ in range(3):
        await parts.look()
    assert starter.told == ["restart d0"]
    assert parts.steps() == ["return", "ended"]


async def test_a_process_is_not_started_beside_one_that_starts_as_soon() -> None:
    starter = Starter({"d0": LaunchSpec(Role.DECODE)})
    parts = Places({"p0": Role.PREFILL, "d0": Role.DECODE}, launcher=starter)
    slow = worker_info("d0", Role.DECODE, incarnation=2, origin=Origin(start_s=1.2 * START_S))
    parts.take(slow)
    await parts.look()
    parts.lose("d0")
    await parts.look()
    assert (parts.steps(), starter.told) == (["return"], [])


LAST = Verdict(Health.SUSPECT, HealthReason.LAST, HealthReason.HANGS)
"""What the judge says of one that nobody can stand in for yet."""


async def test_the_last_of_a_role_that_hangs_is_killed_and_comes_back() -> None:
    starter = Starter({"d0": LaunchSpec(Role.DECODE)})
    parts = Places({"p0": Role.PREFILL, "d0": Role.DECODE}, launcher=starter)
    await parts.look()
    parts.fleet.judge({WorkerId("d0"): Verdict(Health.SUSPECT, HealthReason.HANGS)})
    await parts.look()
    assert starter.told == [], "it is only late"
    version = parts.fleet.urgent_version
    parts.fleet.judge({WorkerId("d0"): LAST})
    assert parts.fleet.urgent_version > version, "whoever fills places is woken"
    for _ in range(3):
        await parts.look()
    assert starter.told == ["restart d0"], "once"
    parts.lose("d0")
    await parts.look()
    parts.come("d0", Role.DECODE, incarnation=2)
    await parts.look()
    assert not await parts.substitutes.look()
    assert parts.steps() == ["return", "ended", "returned"]


async def test_the_last_of_a_role_that_hangs_makes_room_for_a_spare() -> None:
    starter = Starter({"d0": LaunchSpec(Role.DECODE)})
    parts = Places({"p0": Role.PREFILL, "d0": Role.DECODE, "s0": Role.SPARE}, launcher=starter)
    await parts.look()
    parts.fleet.judge({WorkerId("d0"): LAST})
    await parts.look()
    assert (parts.told, starter.told) == ([("s0", "decode")], []), "not before it is taken"
    parts.fleet.judge({WorkerId("d0"): HANGS})
    for _ in range(3):
        await parts.look()
    assert starter.told == ["restart d0"]
    assert parts.steps() == ["spare", "filled", "ended"]


async def test_the_last_of_a_role_that_hangs_stays_where_nobody_kills() -> None:
    parts = Places({"p0": Role.PREFILL, "d0": Role.DECODE})
    await parts.look()
    parts.fleet.judge({WorkerId("d0"): LAST})
    for _ in range(3):
        await parts.look()
    parts.fleet.judge({WorkerId("d0"): Verdict()})
    await parts.look()
    assert parts.told == []
    assert parts.roles()["d0"] == "decode"
    assert parts.steps() == ["return", "returned"]


async def test_a_slow_worker_is_not_killed() -> None:
    starter = Starter({"d0": LaunchSpec(Role.DECODE)})
    parts = Places(TWO | {"s0": Role.SPARE}, launcher=starter)
    await parts.look()
    parts.fleet.judge({WorkerId("d0"): Verdict(Health.DEGRADED, HealthReason.SLOW)})
    for _ in range(5):
        await parts.look(REST_S / 4)
    assert starter.told == []


async def test_who_was_to_leave_is_not_replaced_and_replaces_nobody() -> None:
    starter = Starter({})
    parts = Places(TWO, launcher=starter)
    await parts.look()
    parts.fleet.close(frozenset({WorkerId("d0"), WorkerId("p0"), WorkerId("p1")}))
    parts.lose("d0")
    await parts.look()
    assert parts.steps() == []
    parts.take(parts.infos["d1"], WorkerLoad(blocks_free=0))
    parts.lose("d1")
    await parts.look()
    assert parts.told == [], "else an idle prefill worker would help"
