"""The pool of one or two kvmanagers over stores in memory; windows are ended by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from kvmesh.core.clock import ManualClock
from kvmesh.core.errors import ConfigError, ProtocolError
from kvmesh.core.pool import CopyOrder, EvictionHint, PoolOrder, PoolReport
from kvmesh.core.types import Endpoint, Role, WorkerId
from kvmesh.metadata.memory_store import MemoryMetadataStore
from kvmesh.metadata.pool_store import MemoryPoolStore
from kvmesh.metadata.store import Publisher, StoreUnavailableError
from kvmesh.policy.heat import HeatTable
from kvmesh.rpc.convert_pool import (
    knowledge_to_proto,
    pool_order_from_proto,
    pool_order_to_proto,
    pool_report_to_proto,
)
from kvmesh.rpc.outbox import Outbox
from kvmesh.v1 import kv_manager_service_pb2 as pb
from kvmesh.v1 import pool_types_pb2
from services.kvmanager import heat, metrics
from services.kvmanager.config import PoolConfig
from services.kvmanager.guard import StoreGuard
from services.kvmanager.pool import (
    KEPT_WINDOWS,
    TICKS_PER_WINDOW,
    Pool,
    check_pool_config,
    merge_knowledge,
)
from services.kvmanager.pool_seat import PoolSeat
from tests.unit.policy.test_heat import SIZE, name, prefix

CONFIG = PoolConfig(
    budget_mb_s=1.0, window_s=10.0, min_reads=2.0, segment_blocks=SIZE, max_segments=100
)
BLOCK_BYTES = 1000
COOLS_IN = 5
"""Windows after which a segment that was read once is cold."""

A, B = WorkerId("a"), WorkerId("b")


class FaultyPoolStore(MemoryPoolStore):
    """Refuses to take knowledge when told to."""

    fails = False

    async def put_knowledge(self, replica: str, knowledge: bytes, ttl_s: float) -> None:
        if self.fails:
            raise StoreUnavailableError("told to")
        await super().put_knowledge(replica, knowledge, ttl_s)


class Stage:
    """Stores that replicas share, and workers that are connected to one of them each."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryMetadataStore(self.clock, 1e9)
        self.shared = FaultyPoolStore(self.clock)
        self.guard = StoreGuard(self.store, 0.0, self._recovered)
        self._outboxes: dict[WorkerId, Outbox[pb.PublishResponse]] = {}
        self._read: dict[WorkerId, int] = {}
        self._roles: dict[WorkerId, Role] = {}

    async def _recovered(self) -> None:
        """No sessions here."""

    def replica(self, label: str, config: PoolConfig = CONFIG) -> Pool:
        return Pool(config, self.shared, self.guard, self.clock, label)

    async def worker(
        self, pool: Pool, worker_id: WorkerId, *held: str, role: Role = Role.HYBRID
    ) -> PoolSeat:
        """A worker that holds the prefixes of these paths."""
        self._roles[worker_id] = role
        publisher = Publisher(worker_id, 1, "east", "m")
        slot = (await self.store.register(publisher)).slot
        for number, path in enumerate(held):
            await self.store.apply_events(slot, number + 1, prefix(path), b"")
        outbox = self._outboxes[worker_id] = Outbox()
        seat = PoolSeat(publisher, outbox)
        pool.join(seat)
        self.report(seat, 0)
        return seat

    def report(self, seat: PoolSeat, more: int, room: int = 1000) -> None:
        """The worker read so many blocks more."""
        who = seat.publisher.worker_id
        self._read[who] = self._read.get(who, 100) + more
        role, read = self._roles[who], self._read[who]
        report = PoolReport(role, Endpoint(who, 1), BLOCK_BYTES, room, read)
        assert seat.handle(pb.PublishRequest(pool=pool_report_to_proto(report)))

    async def orders(self, pool: Pool, worker_id: WorkerId) -> Sequence[PoolOrder | None]:
        """What the worker is told; nothing can be told after it."""
        await pool._hand_out()
        self._outboxes[worker_id].close()
        return [pool_order_from_proto(m.order) async for m in self._outboxes[worker_id]]

    async def window(self, *pools: Pool) -> None:
        for pool in pools:
            await pool.heat.count()
            await pool.end_window()
        self.clock.advance(CONFIG.window_s)


@pytest.fixture
def stage() -> Stage:
    return Stage()


async def test_a_hot_prefix_is_copied_to_who_reads_less(stage: Stage) -> None:
    pool = stage.replica("one")
    busy = await stage.worker(pool, A, "abcd")
    await stage.worker(pool, B)
    stage.report(busy, 80)
    for _ in range(10):
        pool.heat.note("m", prefix("abcd") + b"asked for, not found", 4 * SIZE)
    await stage.window(pool)
    assert pool.planning
    (order,) = await stage.orders(pool, B)
    assert isinstance(order, CopyOrder)
    assert (order.source, order.source_incarnation, order.endpoint) == (A, 1, Endpoint("a", 1))
    assert b"".join(order.hashes) == prefix("abcd")
    assert await stage.orders(pool, A) == []


async def test_a_copy_on_its_way_is_ordered_once(stage: Stage) -> None:
    pool = stage.replica("one")
    busy = await stage.worker(pool, A, "ab")
    await stage.worker(pool, B)
    for _ in range(KEPT_WINDOWS - 1):
        stage.report(busy, 80)
        for _ in range(10):
            pool.heat.note("m", prefix("ab"), 2 * SIZE)
        await stage.window(pool)
    assert len(await stage.orders(pool, B)) == 1


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


async def test_the_budget_holds_over_windows(stage: Stage) -> None:
    # 20 bytes per window: a copy of 4 kB is made on credit, and paid back in 200 windows.
    config = PoolConfig(2e-6, CONFIG.window_s, CONFIG.min_reads, SIZE, CONFIG.max_segments)
    pool = stage.replica("one", config)
    busy = await stage.worker(pool, A, "ab", "xy")
    await stage.worker(pool, B)
    ordered = metrics.POOL_ORDERS.labels("copy")._value
    before = ordered.get()
    for _ in range(10):
        stage.report(busy, 100)
        for path in ("ab", "xy"):
            for _ in range(10):
                pool.heat.note("m", prefix(path), 2 * SIZE)
        await stage.window(pool)
    assert ordered.get() == before + 1


async def test_a_copy_that_nobody_reads_any_more_leaves_first(stage: Stage) -> None:
    pool = stage.replica("one")
    full = await stage.worker(pool, A, "abcd")
    await stage.worker(pool, B, "abcd")
    stage.report(full, 0, room=1)
    pool.heat.note("m", prefix("abcd"), 4 * SIZE)
    for _ in range(COOLS_IN):
        await stage.window(pool)
    assert await stage.orders(pool, B) == []
    (hint,) = await stage.orders(pool, A)
    assert isinstance(hint, EvictionHint)
    assert b"".join(hint.hashes) == prefix("abcd")


async def test_a_copy_that_stays_cold_is_named_once(stage: Stage) -> None:
    pool = stage.replica("one")
    full = await stage.worker(pool, A, "abcd")
    await stage.worker(pool, B, "abcd")
    stage.report(full, 0, room=1)
    # After 7, 3.5, ... it is cold with 0.109, and not forgotten yet with 0.055.
    for _ in range(7):
        pool.heat.note("m", prefix("abcd"), 4 * SIZE)
    for _ in range(12):
        await stage.window(pool)
        await pool._hand_out()
    assert len(await stage.orders(pool, A)) == 1


async def test_a_copy_on_a_worker_of_another_role_is_no_second_copy(stage: Stage) -> None:
    pool = stage.replica("one")
    await stage.worker(pool, A, "ab", role=Role.PREFILL)
    await stage.worker(pool, B, "ab", role=Role.DECODE)
    pool.heat.note("m", prefix("ab"), 2 * SIZE)
    for _ in range(COOLS_IN):
        await stage.window(pool)
    assert await stage.orders(pool, A) == []
    assert await stage.orders(pool, B) == []


async def test_what_another_replica_s_schedulers_read_is_not_cold(stage: Stage) -> None:
    one, two = stage.replica("one"), stage.replica("two")
    await stage.worker(one, A, "ab")
    await stage.worker(one, B, "ab")
    one.heat.note("m", prefix("ab"), 2 * SIZE)
    for _ in range(COOLS_IN - 1):
        await stage.window(two, one)
    two.heat.note("m", prefix("ab"), 2 * SIZE)
    await stage.window(one, two)
    assert await stage.orders(one, A) == []
    assert await stage.orders(one, B) == []


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


async def test_the_segments_of_each_namespace_are_counted_apart(stage: Stage) -> None:
    board = stage.replica("one").heat
    board.note("m", prefix("a"), SIZE)
    board.note("n", prefix("b") + prefix("c"), SIZE)
    await board.count()
    found = {space: [each.name for each in heats] for space, heats in board.hottest(9).items()}
    assert found == {"m": [name("a")], "n": [name("b")]}
    assert {space: len(cold) for space, cold in board.cooled(0.5, 2.0, 9).items()} == {
        "m": 1,
        "n": 1,
    }
    assert {space: len(cold) for space, cold in board.cooled(2.0, 9.0, 9).items()} == {
        "m": 0,
        "n": 0,
    }


async def test_a_very_long_prefix_is_counted_at_its_start(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heat, "MAX_NOTED_BLOCKS", 2 * SIZE)
    board = stage.replica("one").heat
    board.note("m", prefix("abc"), 3 * SIZE)
    await board.count()
    assert {each.name for each in board.hottest(9)["m"]} == {name("a"), name("ab")}


async def test_lookups_get_their_turn_between_notes(stage: Stage) -> None:
    board = stage.replica("one").heat
    for _ in range(3 * heat.NOTES_AT_ONCE):
        board.note("m", prefix("a"), SIZE)
    left = list[int]()

    async def watch() -> None:
        while board._notes:
            left.append(len(board._notes))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await board.count()
    await watching
    assert left == [2 * heat.NOTES_AT_ONCE, heat.NOTES_AT_ONCE]
    before = metrics.HEAT_NOTES_DROPPED._value.get()
    board.note("m", prefix("a"), SIZE)
    await board.count()
    assert metrics.HEAT_NOTES_DROPPED._value.get() == before


async def test_a_plan_that_fails_leaves_nothing_on_its_way(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_arguments: object) -> None:
        raise StoreUnavailableError("told to")

    pool = stage.replica("one")
    busy = await stage.worker(pool, A, "ab")
    await stage.worker(pool, B)
    monkeypatch.setattr(pool._planner, "_plan_hints", fails)  # after copies were planned
    counted = metrics.POOL_ORDERS.labels("copy")._value
    before = counted.get()
    for num_orders in (0, 1):
        stage.report(busy, 80)
        for _ in range(10):
            pool.heat.note("m", prefix("ab"), 2 * SIZE)
        await pool.heat.count()
        await pool._safely(pool.end_window)
        assert len(pool._planner._ordered) == num_orders
        assert len(pool._planner.view.orders) == num_orders, "what nobody is told is not shown"
        assert counted.get() == before + num_orders
        stage.clock.advance(CONFIG.window_s)
        monkeypatch.undo()
    assert len(await stage.orders(pool, B)) == 1


@pytest.mark.parametrize(
    "config",
    [
        PoolConfig(window_s=0.0),
        PoolConfig(segment_blocks=0),
        PoolConfig(max_segments=-1),
        PoolConfig(budget_mb_s=-1.0),
    ],
)
def test_a_pool_that_cannot_be_is_an_error_that_names_the_option(config: PoolConfig) -> None:
    with pytest.raises(ConfigError, match=r"pool\.\w+ must be"):
        check_pool_config(config)
    check_pool_config(PoolConfig())
    check_pool_config(PoolConfig(budget_mb_s=0.0))


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
    response = await pool.show(make_mocked_request("GET", "/debug/segments"))
    assert isinstance(response, web.Response)
    assert isinstance(response.text, str)
    shown = json.loads(response.text)
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


async def test_lookups_that_come_too_fast_are_not_all_counted(stage: Stage) -> None:
    pool = stage.replica("one")
    before = metrics.HEAT_NOTES_DROPPED._value.get()
    for _ in range(heat.MAX_NOTES + 5):
        pool.heat.note("m", prefix("a"), SIZE)
    await pool.heat.count()
    await pool.heat.count()
    assert metrics.HEAT_NOTES_DROPPED._value.get() == before + 5, "each of them once"
    (segment,) = pool.heat.hottest(10)["m"]
    assert (segment.name, segment.reads) == (name("a"), heat.MAX_NOTES)
    for _ in range(20):
        pool.heat.fade(0.5)
    assert pool.heat.hottest(10) == {}
