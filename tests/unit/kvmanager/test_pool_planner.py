"""What is ordered, by one or two kvmanagers over stores in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.core.pool import CopyOrder, EvictionHint, OldestOrder
from kvmesh.core.types import Endpoint, Role
from kvmesh.metadata.store import StoreUnavailableError
from kvmesh.policy.global_lru import MAX_OLDEST
from kvmesh.policy.segments import home
from services.kvmanager import metrics
from services.kvmanager.config import PoolConfig
from services.kvmanager.pool import KEPT_WINDOWS
from tests.unit.kvmanager.pool_stage import CONFIG, A, B, Stage
from tests.unit.policy.test_heat import SIZE, name, prefix

COOLS_IN = 5
"""Windows after which a segment that was read once is cold."""


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


@pytest.mark.parametrize(("placement", "num_orders"), [("local", 0), ("hashed", 1)])
async def test_hashed_placement_copies_a_prefix_to_its_home(
    placement: str, num_orders: int, stage: Stage
) -> None:
    path = next(each for each in ("ab", "xy", "cd", "pq") if home(name(each), 2) == 1)
    pool = stage.replica("one", replace(CONFIG, placement=placement))
    await stage.worker(pool, A, path)
    await stage.worker(pool, B)
    for _ in range(10):
        pool.heat.note("m", prefix(path), 2 * SIZE)
    await stage.window(pool)
    assert len(await stage.orders(pool, B)) == num_orders


@pytest.mark.parametrize(("scenario", "num_orders"), [("chat", 1), ("doc", 0)])
@pytest.mark.parametrize("placement", ["local", "hashed"])
async def test_copies_stay_inside_a_group(
    placement: str, scenario: str, num_orders: int, stage: Stage
) -> None:
    path = next(each for each in ("ab", "xy", "cd", "pq") if home(name(each), 2) == 1)
    pool = stage.replica("one", replace(CONFIG, placement=placement))
    busy = await stage.worker(pool, A, path, scenario="chat")
    await stage.worker(pool, B, scenario=scenario)
    stage.report(busy, 80)
    for _ in range(10):
        pool.heat.note("m", prefix(path), 2 * SIZE)
    await stage.window(pool)
    assert len(await stage.orders(pool, B)) == num_orders


def test_an_unknown_eviction_is_refused(stage: Stage) -> None:
    with pytest.raises(ConfigError, match=r"pool\.eviction must be local or global, not 'mine'"):
        stage.replica("one", replace(CONFIG, eviction="mine"))


@pytest.mark.parametrize(("scenario", "num_orders"), [("chat", 1), ("doc", 0)])
async def test_a_copy_in_another_group_is_no_reason_to_give_one_up(
    scenario: str, num_orders: int, stage: Stage
) -> None:
    pool = stage.replica("one", replace(CONFIG, eviction="global", budget_mb_s=0.0))
    full = await stage.worker(pool, A, "ab", scenario="chat")
    await stage.worker(pool, B, "a", scenario=scenario)
    pool.ask_oldest()
    stage.tell_oldest(full, "ab")
    for _ in range(COOLS_IN):
        await stage.window(pool)
    orders = [each for each in await stage.orders(pool, A) if isinstance(each, EvictionHint)]
    assert bool(orders) == bool(num_orders)


@pytest.mark.parametrize(("eviction", "budget"), [("local", 1.0), ("global", 0.0)])
async def test_a_full_worker_gives_up_what_another_one_holds(
    eviction: str, budget: float, stage: Stage
) -> None:
    pool = stage.replica("one", replace(CONFIG, eviction=eviction, budget_mb_s=budget))
    full = await stage.worker(pool, A, "ab")
    await stage.worker(pool, B, "a")
    given_up = metrics.POOL_GIVEN_UP.labels("pool")._value
    before = given_up.get()
    pool.ask_oldest()
    stage.tell_oldest(full, "ab")
    await stage.window(pool)
    if eviction == "local":
        assert await stage.orders(pool, A) == []
        return
    asked, hint = await stage.orders(pool, A)
    assert asked == OldestOrder(MAX_OLDEST)
    assert isinstance(hint, EvictionHint)
    assert b"".join(hint.hashes) == prefix("a"), "the end of the prefix is the last copy"
    assert given_up.get() - before == SIZE
    (shown,) = pool.shown({})["orders"]
    assert (shown["target"], shown["tiers"]) == (A, {"pool": SIZE})


async def test_a_full_worker_keeps_what_somebody_reads(stage: Stage) -> None:
    pool = stage.replica("one", replace(CONFIG, eviction="global", min_reads=100.0))
    full = await stage.worker(pool, A, "ab")
    await stage.worker(pool, B, "ab")
    pool.heat.note("m", prefix("a"), SIZE)
    pool.ask_oldest()
    stage.tell_oldest(full, "ab")
    await stage.window(pool)
    _, hint = await stage.orders(pool, A)
    assert isinstance(hint, EvictionHint)
    assert b"".join(hint.hashes) == prefix("ab")[len(prefix("a")) :]


def test_an_unknown_placement_is_refused(stage: Stage) -> None:
    with pytest.raises(ConfigError, match=r"pool\.placement must be local or hashed, not 'here'"):
        stage.replica("one", replace(CONFIG, placement="here"))


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
