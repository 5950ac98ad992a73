from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping

import pytest

from kvmesh.core.launch import LaunchSpec
from kvmesh.core.types import Role, RoutePlan, WorkerId, WorkerLoad
from kvmesh.metadata.memory_store import MemoryFleetStore
from kvmesh.policy.group_life import GroupWish
from kvmesh.rpc.convert_group import state_word
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Membership
from services.scheduler.groups import FIRST_PAUSE_S, Groups
from tests.unit.policy.fleet_examples import query, worker_info
from tests.unit.scheduler.parts import Parts
from tests.unit.scheduler.test_substitutes import IDLE, Starter

PREFILL, DECODE = LaunchSpec(Role.PREFILL), LaunchSpec(Role.DECODE)
HOME = {"p0": PREFILL, "d0": DECODE}


class Grouped(Parts):
    """A fleet and a launcher; workers register when the test says so."""

    def __init__(self, kept: Mapping[str, LaunchSpec] = HOME) -> None:
        super().__init__()
        self.starter = Starter(kept)
        self.store = MemoryFleetStore(self.clock)
        self.members: dict[str, Membership] = {}
        self.renew()
        self.register()

    def renew(self) -> None:
        """Another scheduler takes over; it knows what is in the store."""
        self.groups = Groups(
            self.fleet,
            FleetFeed(self.fleet),
            self.starter,
            self.store,
            self.decisions,
            self.clock,
            owner="one",
        )

    def register(self) -> None:
        """All that are kept have loaded their models."""
        for name, spec in self.starter.kept.items():
            if name not in self.members:
                info = worker_info(name, spec.role, scenario=spec.scenario)
                member = self.fleet.register(info, self.clock.now())
                assert isinstance(member, Membership)
                self.members[name] = member
                self.report(name, IDLE)

    def report(self, name: str, load: WorkerLoad) -> None:
        assert self.fleet.report(self.members[name], load, self.clock.now())

    async def look(self, after_s: float = 0.5) -> None:
        self.clock.advance(after_s)
        await self.groups.look()
        await asyncio.sleep(0)
        for name in [each for each in self.members if each not in self.starter.kept]:
            self.fleet.leave(self.members.pop(name))

    async def states(self) -> dict[str, str]:
        return {each.wish.scenario: state_word(each.state) for each in await self.groups.views()}

    async def decoders(self) -> list[str]:
        plan = await self.router.route(query(2000), "")
        assert isinstance(plan, RoutePlan)
        return sorted(each.worker_id for each in plan.decode)


async def test_workers_that_were_there_are_a_ready_group_that_nobody_touches() -> None:
    parts = Grouped()
    for _ in range(3):
        await parts.look()
    assert await parts.states() == {"": "ready"}
    assert parts.starter.told == []
    assert parts.fleet.closed == frozenset()


async def test_one_more_serves_when_it_is_there_and_one_less_ends_when_it_is_idle() -> None:
    parts = Grouped()
    await parts.groups.apply(GroupWish("", prefill=1, decode=2))
    for _ in range(3):
        await parts.look()
    assert parts.starter.told == ["start new-1 "], "once"
    assert await parts.states() == {"": "changing"}
    parts.register()
    await parts.look()
    assert await parts.decoders() == ["d0", "new-1"]
    await parts.groups.apply(GroupWish("", prefill=1, decode=1))
    parts.report("new-1", dataclasses.replace(IDLE, decode_running=1))
    for _ in range(3):
        await parts.look()
    assert await parts.decoders() == ["d0"], "it gets nothing new"
    assert parts.starter.told[1:] == []
    parts.report("new-1", IDLE)
    await parts.look()
    assert parts.starter.told[1:] == ["stop new-1"]


async def test_an_upgrade_opens_when_all_are_there_whichever_scheduler_looks() -> None:
    parts = Grouped()
    await parts.groups.apply(GroupWish("", "/m/two", prefill=1, decode=1))
    await parts.look()
    parts.renew()
    await parts.look()
    assert len(parts.starter.told) == 2
    parts.register()
    parts.renew()
    assert await parts.decoders() == ["d0"], "seen before the next look: closed with its start"
    await parts.look()
    parts.renew()
    assert await parts.decoders() == ["new-2"]
    await parts.look()
    await parts.look()
    assert sorted(parts.starter.told[2:]) == ["stop d0", "stop p0"]
    assert await parts.states() == {"": "ready"}


async def test_a_group_of_another_scenario_comes_and_goes() -> None:
    parts = Grouped()
    wish = GroupWish("chat", prefill=1, decode=1)
    await parts.groups.apply(wish)
    await parts.look()
    assert await parts.states() == {"": "ready", "chat": "gathering"}
    parts.register()
    await parts.look()
    await parts.look()
    assert await parts.states() == {"": "ready", "chat": "ready"}
    await parts.groups.apply(dataclasses.replace(wish, removing=True))
    for _ in range(4):
        await parts.look()
    assert await parts.states() == {"": "ready"}
    assert set(parts.starter.kept) == set(HOME)


async def test_a_group_connects_before_it_opens_whichever_scheduler_looks() -> None:
    parts = Grouped()
    await parts.groups.apply(GroupWish("chat", prefill=1, decode=1))
    await parts.look()
    parts.register()
    decode = WorkerId("new-2")
    for reason in ("", "p cannot send KV to it: no route to host"):
        parts.fleet.hold({decode: reason})
        for _ in range(2):
            await parts.look()
            parts.renew()
        assert await parts.states() == {"": "ready", "chat": "connecting"}
        assert parts.fleet.closed == {"new-1", decode}
    view = (await parts.groups.views())[1]
    assert view.problem.startswith("new-2: p cannot send KV to it: no route to host. ")
    assert "worker.data_port" in view.problem
    assert [each.connecting for each in view.workers] == [False, True]
    parts.fleet.hold({})
    await parts.look()
    await parts.look()
    assert await parts.states() == {"": "ready", "chat": "ready"}
    assert parts.fleet.closed == frozenset()


async def test_a_worker_that_cannot_be_connected_leaves_an_open_group_open() -> None:
    parts = Grouped()
    await parts.groups.apply(GroupWish("", prefill=1, decode=2))
    await parts.look()
    parts.register()
    parts.fleet.hold({WorkerId("new-1"): "p0 cannot send KV to it: no route to host"})
    await parts.look()
    assert await parts.states() == {"": "changing"}
    assert await parts.decoders() == ["d0"]
    parts.fleet.hold({})
    await parts.look()
    assert await parts.states() == {"": "ready"}
    assert await parts.decoders() == ["d0", "new-1"]


async def test_workers_that_end_at_their_start_are_not_started_all_the_time() -> None:
    parts = Grouped()
    await parts.groups.apply(GroupWish("", "/m/none", prefill=1, decode=1))
    for _ in range(20):
        await parts.look(FIRST_PAUSE_S / 2)
        for name in [each for each in parts.starter.kept if each not in HOME]:
            del parts.starter.kept[WorkerId(name)]
    assert 4 <= len(parts.starter.told) <= 12
    (view,) = await parts.groups.views()
    assert "ended" in view.problem
    assert await parts.decoders() == ["d0"]


SIZES = range(1, 3)


async def test_a_signal_gives_a_ready_group_one_worker_more_or_less() -> None:
    parts = Grouped()
    members = [WorkerId(name) for name in HOME]
    assert await parts.groups.scale(members, Role.DECODE, 1, sizes=SIZES) == ""
    await parts.look()
    assert parts.starter.told == ["start new-1 "]
    assert "changing" in await parts.groups.scale(members, Role.DECODE, 1, sizes=SIZES)
    parts.register()
    await parts.look()
    assert await parts.states() == {"": "ready"}
    assert "3 decode" in await parts.groups.scale(members, Role.DECODE, 1, sizes=SIZES)
    assert await parts.groups.scale(members, Role.DECODE, -1, sizes=SIZES) == ""
    await parts.look()
    await parts.look()
    assert parts.starter.told[1:] == ["stop new-1"]
    assert "0 prefill" in await parts.groups.scale(members, Role.PREFILL, -1, sizes=SIZES)
    assert await parts.decoders() == ["d0"]


async def test_a_signal_for_workers_that_the_launcher_does_not_know_changes_nothing() -> None:
    parts = Grouped({**HOME, "spare": LaunchSpec(Role.SPARE)})
    for name in ("elsewhere", "spare"):
        told = await parts.groups.scale([WorkerId(name)], Role.DECODE, 1, sizes=SIZES)
        assert "launcher's" in told
    await parts.look()
    assert parts.starter.told == []


@pytest.mark.parametrize("leads", [True, False])
async def test_of_several_schedulers_one_gives_orders(leads: bool) -> None:
    parts = Grouped()
    if not leads:
        assert await parts.store.acquire_lease("groups", "two", 1000.0)
    await parts.groups.apply(GroupWish("", prefill=1, decode=2))
    await parts.look()
    assert bool(parts.starter.told) is leads
