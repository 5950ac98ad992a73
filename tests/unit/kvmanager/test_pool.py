"""The pool of one or two kvmanagers over stores in memory; windows are ended by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from kvmesh.core.errors import ProtocolError
from kvmesh.core.pool import CopyOrder, EvictionHint
from kvmesh.core.slots import Publisher
from kvmesh.metadata.store import StoreUnavailableError
from kvmesh.policy.heat import HeatTable
from kvmesh.rpc.convert_pool import knowledge_to_proto, pool_order_to_proto
from kvmesh.rpc.outbox import Outbox
from kvmesh.v1 import kv_manager_service_pb2 as pb
from kvmesh.v1 import pool_types_pb2
from services.kvmanager import metrics
from services.kvmanager.config import PoolConfig
from services.kvmanager.pool import KEPT_WINDOWS, TICKS_PER_WINDOW, merge_knowledge
from services.kvmanager.pool_seat import PoolSeat
from tests.unit.kvmanager.pool_stage import CONFIG, A, B, Stage
from tests.unit.policy.test_heat import SIZE, name, prefix


async def test_reads_of_two_replicas_count_together_and_one_of_them_plans(stage: Stage) -> None:
    one, two = stage.replica("one"), stage.replica("two")
    busy = await stage.worker(one, A, "ab")
    await stage.worker(two, B)
    await stage.window(two, one)
    assert (one.planning, two.planning) == (False, True)
    stage.report(busy, 40)
    # Neither saw enough alone.
    one.heat.note("m", prefix("ab"), 2 * SIZE)
    two.heat.note("m", prefix("ab"), 2 * SIZE)
    await stage.window(one, two)
    assert (one.planning, two.planning) == (False, True)
    assert await stage.orders(one, A) == []
    (order,) = await stage.orders(two, B)
    assert isinstance(order, CopyOrder)


async def test_another_replica_plans_when_the_lease_of_a_dead_one_ends(stage: Stage) -> None:
    one, two = stage.replica("one"), stage.replica("two")
    await stage.window(one, two)
    assert (one.planning, two.planning) == (True, False)
    stage.clock.advance(CONFIG.window_s * KEPT_WINDOWS)
    await stage.window(two)
    assert two.planning


async def test_without_a_budget_nothing_is_planned(stage: Stage) -> None:
    pool = stage.replica("one", PoolConfig(budget_mb_s=0.0))
    await stage.window(pool)
    assert not pool.planning
    assert await stage.shared.all_knowledge() == []


async def test_a_failure_of_the_store_costs_a_window(stage: Stage) -> None:
    pool = stage.replica("one")
    stage.shared.fails = True
    await pool._safely(pool.end_window)
    assert not pool.planning
    stage.shared.fails = False
    await pool._safely(pool.end_window)
    assert pool.planning


@pytest.mark.parametrize("why", ["fails", "is down", "is damaged"])
async def test_who_planned_and_lost_the_store_plans_no_longer(stage: Stage, why: str) -> None:
    pool = stage.replica("one")
    asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1
        if why == "fails":
            raise StoreUnavailableError("told to")
        if why == "is damaged":
            raise ProtocolError("bad", "told to")

    await pool._safely(pool.end_window)
    assert pool.planning
    metrics.POOL_HOT_RUNS.set(7)
    if why == "is down":
        stage.guard._failed.set()
    await pool._safely(ask)
    assert asked == (why != "is down")
    assert not pool.planning
    assert metrics.POOL_PLANNING._value.get() == 0
    assert metrics.POOL_HOT_RUNS._value.get() == 0


async def test_what_goes_well_leaves_the_plan_with_its_replica(stage: Stage) -> None:
    pool = stage.replica("one")
    await pool._safely(pool.end_window)
    metrics.POOL_HOT_RUNS.set(7)
    await pool._safely(pool._hand_out)
    assert pool.planning
    assert metrics.POOL_PLANNING._value.get() == 1
    assert metrics.POOL_HOT_RUNS._value.get() == 7


async def test_a_running_pool_counts_and_hands_out_often_and_ends_windows(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = stage.replica("one")
    done, slept, sleep = list[str](), 0.0, asyncio.sleep
    over = asyncio.Event()

    async def turn(seconds: float) -> None:
        nonlocal slept
        slept += seconds
        await sleep(0)

    def noting(what: str) -> Callable[[], Awaitable[None]]:
        async def note() -> None:
            done.append(what)
            if done.count("window") == 2:
                over.set()

        return note

    monkeypatch.setattr("services.kvmanager.pool.asyncio.sleep", turn)
    monkeypatch.setattr(pool.heat, "count", noting("count"))
    monkeypatch.setattr(pool, "_hand_out", noting("orders"))
    monkeypatch.setattr(pool, "end_window", noting("window"))
    assert await stage.shared.may_plan("one", 1e9)
    running = asyncio.create_task(pool.run())
    await over.wait()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    window = [*TICKS_PER_WINDOW * ["count", "orders"], "window"]
    assert done[: 2 * len(window)] == 2 * window
    assert slept >= 2 * CONFIG.window_s * (1 - 1e-9)
    assert slept <= 2 * CONFIG.window_s * (1 + 2 / TICKS_PER_WINDOW)
    assert await stage.shared.may_plan("two", 1e9), "who leaves gives the plan up"


async def test_a_newer_life_and_the_replica_that_counted_more_speak_for_a_worker(
    stage: Stage,
) -> None:
    pool = stage.replica("one")
    seat = await stage.worker(pool, A)
    stage.report(seat, 10)
    member = seat.member
    assert member is not None
    lives = [(2, 5.0), (3, 1.0), (3, 4.0), (3, 2.0), (1, 9.0)]
    told = [
        knowledge_to_proto({}, {}, [replace(member, incarnation=life, read_blocks=read)])
        for life, read in lives
    ]
    encoded = [each.SerializeToString() for each in told]
    for order in (encoded, encoded[::-1]):
        _, (found,) = merge_knowledge([order[0], b"\xff\xff", *order[1:]], pool._make_table)
        assert (found.incarnation, found.read_blocks) == (3, 4.0)


async def test_a_worker_that_has_not_reported_is_told_nothing(stage: Stage) -> None:
    pool = stage.replica("one")
    publisher = Publisher(B, 1, "east", "m")
    outbox: Outbox[pb.PublishResponse] = Outbox()
    pool.join(PoolSeat(publisher, outbox))
    order = pool_order_to_proto(EvictionHint((name("a"),)))
    await stage.shared.put_orders(B, [order.SerializeToString()], 60.0)
    await pool._hand_out()
    await pool.end_window()
    assert list((await stage.shared.take_orders([B])).values()) == [[order.SerializeToString()]]


async def test_what_another_one_left_damaged_ends_no_service(stage: Stage) -> None:
    pool = stage.replica("one")
    await stage.worker(pool, A, "ab")
    await stage.shared.put_orders(A, [b"\xff\xff\xff"], 60.0)
    await pool._safely(pool._hand_out)
    cut_off = pool_types_pb2.CooledPrefix(prefix=b"x" * 33, own_blocks=1)
    heat = pool_types_pb2.NamespaceReads(namespace="m", cooled=[cut_off])
    knowledge = pool_types_pb2.PoolKnowledge(heat=[heat])
    await stage.shared.put_knowledge("two", knowledge.SerializeToString(), 60.0)
    await pool._safely(pool.end_window)
    assert await stage.orders(pool, A) == []


async def test_people_see_members_segments_and_orders(stage: Stage) -> None:
    pool = stage.replica("one")
    busy = await stage.worker(pool, A, "ab")
    await stage.worker(pool, B)
    stage.report(busy, 80, room=9)
    for _ in range(10):
        pool.heat.note("m", prefix("ab"), 2 * SIZE)
    await stage.window(pool)
    shown = json.loads(json.dumps(pool.shown({})))
    assert shown["planning"]
    assert shown["reads_cv"] == 1.0
    workers = {each.pop("worker_id"): each for each in shown["workers"]}
    assert workers[A] == {
        "cluster": "east",
        "role": "hybrid",
        "read_blocks": 80.0,
        "room_blocks": 9,
        "leaving": False,
    }
    assert len(workers) == 2
    assert shown["segments"]
    assert len(shown["orders"]) == 1


async def test_who_left_is_no_member(stage: Stage) -> None:
    pool = stage.replica("one")
    seat = await stage.worker(pool, A, "ab")
    await stage.window(pool)
    _, members = merge_knowledge(await stage.shared.all_knowledge(), pool._make_table)
    assert [member.worker_id for member in members] == [A]
    pool.leave(seat)
    await stage.window(pool)
    _, members = merge_knowledge(await stage.shared.all_knowledge(), pool._make_table)
    assert members == []


async def test_what_a_worker_read_counts_from_its_second_report(stage: Stage) -> None:
    pool = stage.replica("one")
    seat = await stage.worker(pool, A)
    assert seat.member is not None
    assert seat.member.read_blocks == 0
    stage.report(seat, 30)
    stage.report(seat, 10)
    seat.fade(0.5)
    assert seat.member.read_blocks == 20
    await pool.end_window()
    assert seat.member.read_blocks == 10


def test_knowledge_that_cannot_be_read_is_left_out() -> None:
    assert merge_knowledge([b"\xff\xff\xff"], lambda: HeatTable(1, 1)) == ({}, [])
