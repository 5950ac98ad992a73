from __future__ import annotations

import dataclasses

from kvmesh.core.empty_spare import EmptySpare, Origin
from kvmesh.core.launch import LaunchSpec
from kvmesh.core.types import Role, WorkerId
from kvmesh.policy.group_life import GroupWish
from services.scheduler.empty_spares import EmptySpares
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Membership
from services.scheduler.group_launcher import GroupLauncher
from services.scheduler.groups import FIRST_PAUSE_S, Groups
from services.scheduler.registrations import Orders
from tests.unit.policy.fleet_examples import worker_info
from tests.unit.scheduler.test_groups_life import DECODE, HOME, Grouped
from tests.unit.scheduler.test_substitutes import IDLE

SPARE = LaunchSpec(Role.SPARE)
ONE_MORE = GroupWish("", prefill=1, decode=2)


class WithEmpties(Grouped):
    """Groups over a launcher with empty spares e0 and e1."""

    def __init__(self) -> None:
        self.empties = EmptySpares()
        self.drained: list[str] = []
        self.streams: dict[str, Orders] = {}
        super().__init__()
        for name in ("e0", "e1"):
            self.starter.kept[WorkerId(name)] = SPARE
            self.waits(name)
        # Its launcher does not keep this one.
        self.waits("away")

    def renew(self) -> None:
        launcher = GroupLauncher(self.starter, self.fleet, self.empties, self._drain)
        feed, clock = FleetFeed(self.fleet), self.clock
        self.groups = Groups(
            self.fleet, feed, launcher, self.store, self.decisions, clock, owner="one"
        )

    def register(self) -> None:
        for name, spec in self.starter.kept.items():
            if name not in self.members and spec != SPARE:
                self.take(name, spec, Origin("/m"))

    def take(self, name: str, spec: LaunchSpec, origin: Origin) -> None:
        info = worker_info(name, spec.role, scenario=spec.scenario, origin=origin)
        member = self.fleet.register(info, self.clock.now())
        assert isinstance(member, Membership)
        self.members[name] = member
        self.report(name, IDLE)

    def waits(self, name: str) -> None:
        self.streams[name] = Orders()
        self.empties.note(EmptySpare(WorkerId(name), 1, "east", "kvmesh"), self.streams[name])

    def loads(self, name: str) -> None:
        """A spare has loaded its model."""
        spare = self.empties.find(WorkerId(name))
        assert spare is not None
        assert spare.assignment is not None
        told = spare.assignment
        assert (told.checkpoint, told.dtype, told.block_size) == ("/m", "float32", 16)
        self.empties.forget(self.streams[name])
        self.take(name, LaunchSpec(told.role, told.scenario), Origin("/m", assignment=told))

    def fails(self, name: str) -> None:
        """Its process ends while it loads, and waits again."""
        self.empties.forget(self.streams[name])
        self.waits(name)

    def _drain(self, worker_id: WorkerId, reason: str) -> bool:
        assert reason
        self.drained.append(worker_id)
        self.fleet.leave(self.members.pop(worker_id))
        self.waits(worker_id)
        return True

    def loading(self) -> list[str]:
        return [each.worker_id for each in self.empties.all() if not each.is_waiting]


async def test_a_group_takes_an_empty_spare_and_gives_it_back() -> None:
    parts = WithEmpties()
    await parts.groups.apply(ONE_MORE)
    for _ in range(3):
        await parts.look()
    assert parts.loading() == ["e0"], "one, and once"
    parts.renew()
    await parts.look()
    assert parts.loading() == ["e0"], "whichever scheduler looks"
    parts.loads("e0")
    await parts.look()
    assert await parts.states() == {"": "ready"}
    assert await parts.decoders() == ["d0", "e0"]
    await parts.groups.apply(dataclasses.replace(ONE_MORE, decode=1))
    for _ in range(3):
        await parts.look()
    assert parts.drained == ["e0"]
    assert await parts.states() == {"": "ready"}
    found = parts.empties.find(WorkerId("e0"))
    assert found is not None
    assert found.is_waiting
    assert parts.starter.told == []


async def test_where_no_empty_spare_is_left_a_process_is_started() -> None:
    parts = WithEmpties()
    await parts.groups.apply(dataclasses.replace(ONE_MORE, decode=4))
    await parts.look()
    assert parts.loading() == ["e0", "e1"]
    assert parts.starter.told == ["start new-1 "]


async def test_another_checkpoint_than_anybody_has_is_left_to_processes() -> None:
    parts = WithEmpties()
    await parts.groups.apply(GroupWish("", "/m/two", prefill=1, decode=1))
    await parts.look()
    assert parts.loading() == []
    assert parts.starter.told == ["start new-1 /m/two", "start new-2 /m/two"]


async def test_a_spare_that_cannot_load_is_not_assigned_all_the_time() -> None:
    parts = WithEmpties()
    await parts.groups.apply(ONE_MORE)
    await parts.look()
    assert parts.loading() == ["e0"]
    parts.fails("e0")
    await parts.look()
    assert parts.loading() == []
    await parts.look(FIRST_PAUSE_S)
    assert parts.loading() == ["e0"]


async def test_workers_without_an_assignment_are_as_the_launcher_says() -> None:
    parts = WithEmpties()
    launcher = GroupLauncher(parts.starter, parts.fleet, parts.empties, parts._drain)
    kept = {each.worker_id: each.spec for each in await launcher.list()}
    assert kept == HOME | {"e0": SPARE, "e1": SPARE}
    await launcher.restart(WorkerId("d0"))
    await launcher.stop(WorkerId("d0"))
    assert parts.starter.told == ["restart d0", "stop d0"]
    assert DECODE not in parts.starter.kept.values()
