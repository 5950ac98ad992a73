from __future__ import annotations

import asyncio
import random

import pytest

from kvmesh.core.details import ModelDetail, WorkerDetail
from kvmesh.core.types import Role, WorkerLoad
from kvmesh.rpc.fleet_view import FleetMirror
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import MAX_GONE, Fleet, Membership
from tests.unit.policy.fleet_examples import worker_info


async def test_first_view_comes_at_once_and_changes_follow() -> None:
    fleet = Fleet(3.0)
    feed = FleetFeed(fleet)
    fleet.register(worker_info("p"), 0.0)
    views = feed.views(hold_empty_s=0.0)
    first = await anext(views)
    assert [each.info.worker_id for each in first.workers] == ["p"]
    following = asyncio.ensure_future(anext(views))
    await asyncio.sleep(0)
    assert not following.done()
    fleet.register(worker_info("q"), 0.0)
    feed.changed()
    assert len((await following).workers) == 2
    await views.aclose()  # type: ignore[attr-defined]


async def test_another_role_is_told_at_once_with_who_has_it() -> None:
    fleet = Fleet(3.0)
    feed = FleetFeed(fleet)
    fleet.register(worker_info("p"), 0.0)
    fleet.register(worker_info("q"), 0.0)
    views = feed.views(hold_empty_s=0.0, changes=True)
    mirror = FleetMirror()
    mirror.take(await anext(views))
    before = fleet.urgent_version
    fleet.register(worker_info("p", role=Role.DECODE), 0.1)  # as a worker says it, in the same life
    feed.changed()
    assert fleet.urgent_version > before
    mirror.take(await anext(views))
    assert [each.info.role for each in mirror.workers] == [Role.DECODE, Role.PREFILL]
    await views.aclose()  # type: ignore[attr-defined]


async def test_details_are_for_those_who_ask() -> None:
    fleet = Fleet(3.0)
    feed = FleetFeed(fleet)
    feed.models = lambda: [ModelDetail("m", "far", 300.0)]
    feed.kvmanager = lambda: False
    member = fleet.register(worker_info("p"), 0.0)
    assert isinstance(member, Membership)
    fleet.note_detail(member, WorkerDetail(cordoned=True))
    plain = await anext(feed.views(hold_empty_s=0.0))
    assert not plain.workers[0].detail.cordoned
    assert not plain.models
    assert not plain.HasField("kvmanager_connected")
    detailed = await anext(feed.views(hold_empty_s=0.0, with_detail=True))
    assert detailed.workers[0].detail.cordoned
    assert detailed.models[0].threshold_tokens == 300.0
    assert detailed.HasField("kvmanager_connected")
    assert not detailed.kvmanager_connected


async def test_changes_of_load_that_come_together_are_one_message() -> None:
    fleet = Fleet(3.0)
    feed = FleetFeed(fleet)
    member = fleet.register(worker_info("p"), 0.0)
    assert isinstance(member, Membership)
    views = feed.views(hold_empty_s=0.0)
    await anext(views)
    following = asyncio.ensure_future(anext(views))
    for active in (1, 2, 3):
        await asyncio.sleep(0)
        fleet.report(member, WorkerLoad(prefill_active=active), float(active))
        feed.changed()
    message = await following
    assert message.workers[0].load.prefill_active == 3
    assert message.version == fleet.version
    await views.aclose()  # type: ignore[attr-defined]


async def test_empty_first_view_waits_for_the_first_worker() -> None:
    fleet = Fleet(3.0)
    feed = FleetFeed(fleet)
    views = feed.views(hold_empty_s=30.0)
    first = asyncio.ensure_future(anext(views))
    await asyncio.sleep(0)
    fleet.register(worker_info("p"), 0.0)
    feed.changed()
    assert len((await first).workers) == 1
    await views.aclose()  # type: ignore[attr-defined]


async def test_empty_first_view_comes_in_the_end() -> None:
    views = FleetFeed(Fleet(3.0)).views(hold_empty_s=0.001)
    assert len((await anext(views)).workers) == 0
    await views.aclose()  # type: ignore[attr-defined]


async def test_after_the_first_view_only_changes_are_sent() -> None:
    fleet, members = Fleet(3.0), {}
    feed = FleetFeed(fleet)
    for name in ("p", "q", "r"):
        member = fleet.register(worker_info(name), 0.0)
        assert isinstance(member, Membership)
        members[name] = member
    views = feed.views(hold_empty_s=0.0, changes=True)
    first = await anext(views)
    assert (first.base_version, len(first.workers)) == (0, 3)
    fleet.report(members["q"], WorkerLoad(prefill_active=1), 1.0)
    fleet.leave(members["r"])
    fleet.register(worker_info("s"), 1.0)
    feed.changed()
    second = await anext(views)
    assert second.base_version == first.version
    assert list(second.gone) == ["r"]
    load, new = second.workers
    assert (load.worker_id, load.HasField("info"), load.load.prefill_active) == ("q", False, 1)
    assert new.info.worker_id == "s"
    assert second.ByteSize() < first.ByteSize()
    await views.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(5))
async def test_changes_add_up_to_the_fleet(seed: int) -> None:
    draw, fleet, mirror = random.Random(seed), Fleet(3.0), FleetMirror()
    feed, members = FleetFeed(fleet), dict[str, Membership]()
    views = feed.views(hold_empty_s=0.0, changes=True)
    for step in range(60):
        name = f"w{draw.randrange(6)}"
        if name not in members or draw.random() < 0.2:
            joined = fleet.register(worker_info(name), step)
            assert isinstance(joined, Membership)
            members[name] = joined
        elif draw.random() < 0.3:
            fleet.leave(members.pop(name))
        else:
            fleet.report(members[name], WorkerLoad(prefill_active=step), step)
        feed.changed()
        if draw.random() < 0.4:
            version = fleet.version
            message = await anext(views)
            assert message.version == version
            mirror.take(message)
            by_name = {each.info.worker_id: each for each in mirror.workers}
            assert by_name == {each.info.worker_id: each for each in fleet.workers()}
            fleet.note_planned()
            feed.changed()
    await views.aclose()  # type: ignore[attr-defined]


async def test_who_is_too_far_behind_gets_the_whole_fleet() -> None:
    fleet = Fleet(3.0)
    feed = FleetFeed(fleet)
    fleet.register(worker_info("p"), 0.0)
    views = feed.views(hold_empty_s=0.0, changes=True)
    first = await anext(views)
    for n in range(MAX_GONE + 1):
        joined = fleet.register(worker_info(f"w{n}"), 0.0)
        assert isinstance(joined, Membership)
        fleet.leave(joined)
    assert fleet.changes_since(first.version) is None
    feed.changed()
    second = await anext(views)
    assert second.base_version == 0
    assert [each.info.worker_id for each in second.workers] == ["p"]
    await views.aclose()  # type: ignore[attr-defined]
