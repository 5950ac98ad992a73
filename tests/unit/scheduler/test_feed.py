from __future__ import annotations

import asyncio

from kvmesh.core.types import ModelDetail, WorkerDetail, WorkerLoad
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Fleet, Membership
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


async def test_details_are_for_those_who_ask() -> None:
    fleet = Fleet(3.0)
    feed = FleetFeed(fleet)
    feed.models = lambda: [ModelDetail("m", "far", 300.0)]
    member = fleet.register(worker_info("p"), 0.0)
    assert isinstance(member, Membership)
    fleet.note_detail(member, WorkerDetail(cordoned=True))
    plain = await anext(feed.views(hold_empty_s=0.0))
    assert not plain.workers[0].detail.cordoned
    assert not plain.models
    detailed = await anext(feed.views(hold_empty_s=0.0, with_detail=True))
    assert detailed.workers[0].detail.cordoned
    assert detailed.models[0].threshold_tokens == 300.0


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
