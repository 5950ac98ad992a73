from __future__ import annotations

from dataclasses import replace

import pytest

from kvmesh.core.types import Placement, RequestId, RoutePlan, RouteQuery, WorkerId
from kvmesh.policy.plans_ahead import (
    AHEAD_S,
    MAX_AHEAD,
    MAX_KINDS,
    REST_S,
    PlanKind,
    PlanStock,
    kind_of,
)

QUERY = RouteQuery(RequestId("r"), "m", 100, 10)
KIND = PlanKind("m", "", Placement.AUTO, 127)


def plan(name: str) -> RoutePlan:
    return RoutePlan(Placement.AGGREGATED, (), (), cache_known=False, reason=name, policy="p")


def came(stock: PlanStock, times: int, now: float = 0.0) -> None:
    """So many requests came, and none found a plan."""
    for _ in range(times):
        assert stock.take(KIND, 100, now) is None


def stocked(count: int, now: float = 0.0) -> PlanStock:
    stock = PlanStock()
    came(stock, count + 1, now)
    assert stock.wish(KIND, now).count == count
    stock.put(KIND, [plan(str(number)) for number in range(count)], now)
    return stock


@pytest.mark.parametrize(
    ("num_tokens", "longest", "expected"),
    [(64, 4096, 127), (127, 4096, 127), (128, 4096, 255), (1, 4096, 1), (100, 110, 110)],
)
def test_prompts_of_up_to_twice_the_length_are_of_one_kind(
    num_tokens: int, longest: int, expected: int
) -> None:
    assert kind_of(replace(QUERY, num_tokens=num_tokens), longest) == KIND._replace(
        num_tokens=expected
    )


@pytest.mark.parametrize("needs", [{"avoid": frozenset({WorkerId("w")})}, {"waiting": 1}])
def test_who_was_refused_or_sees_others_wait_needs_a_plan_of_its_own(needs: dict[str, int]) -> None:
    assert kind_of(replace(QUERY, **needs), 4096) is None  # type: ignore[arg-type]


def test_as_many_are_wished_for_as_came_lately() -> None:
    stock = PlanStock()
    came(stock, 1)
    assert stock.wish(KIND, 0.0).count == 0
    came(stock, 2, 0.01)
    assert stock.wish(KIND, 0.01).count == 2
    came(stock, 1, AHEAD_S + 0.005)  # the first one was too long ago
    assert stock.wish(KIND, AHEAD_S + 0.005).count == 0  # an answer is on its way
    assert stock.wish(KIND, AHEAD_S + 0.02).count == 0  # only the last one was lately


@pytest.mark.parametrize(("most", "expected"), [(3, 3), (1000, MAX_AHEAD), (0, 0)])
def test_a_wish_has_a_limit(most: int, expected: int) -> None:
    stock = PlanStock(most)
    came(stock, 2 * MAX_AHEAD)
    assert stock.wish(KIND, 0.0).count == expected


def test_who_finds_few_exchanges_one_and_has_more_made() -> None:
    stock = stocked(8)
    for number in range(6):
        assert not stock.is_low(KIND, 0.01)
        taken = stock.take(KIND, 100, 0.01)
        assert taken is not None
        assert taken.reason == str(number)
    assert stock.is_low(KIND, 0.01)  # a quarter is left
    assert stock.take(KIND, 100, 0.01, is_exchanged=True) is not None
    wish = stock.wish(KIND, 0.01, is_exchanged=True)
    assert (wish.count, wish.used) == (15 - 1, 6)
    assert not stock.is_low(KIND, 0.01)  # more are on their way
    assert stock.take(KIND, 100, 0.01) is not None
    stock.put(KIND, [plan("its own")], 0.02)
    stock.put(KIND, [plan("a")] * 8, 0.02)
    stock.put(KIND, [plan("b")] * 6, 0.02)
    stock.put(KIND, [plan("too many")], 0.02)
    assert len(stock) == 1 + 8 + 6


def test_plans_that_never_come_are_wished_for_again() -> None:
    stock = PlanStock()
    came(stock, 3)
    assert stock.wish(KIND, 0.0).count == 2
    came(stock, 3, AHEAD_S)
    assert stock.wish(KIND, AHEAD_S).count == 2


def test_where_fewer_come_than_were_wished_for_more_are_asked_for_soon() -> None:
    stock = PlanStock()
    came(stock, 101)
    assert stock.wish(KIND, 0.0).count == 100
    for _ in range(4):
        stock.put(KIND, [plan("early")] * 8, 0.01)
    assert not stock.is_low(KIND, 0.01)
    for _ in range(8):
        assert stock.take(KIND, 100, 0.02) is not None
    assert not stock.is_low(KIND, 0.02)  # the rest may be on its way
    quiet = 0.01 + REST_S
    assert stock.is_low(KIND, quiet)
    assert stock.take(KIND, 100, quiet, is_exchanged=True) is not None
    assert stock.wish(KIND, quiet, is_exchanged=True).count == 110 - 1 - 23
    # What there is keeps its age.
    assert stock.take(KIND, 100, AHEAD_S - 0.001) is not None
    assert stock.take(KIND, 100, AHEAD_S) is None


def test_plans_that_come_one_after_the_other_are_all_taken() -> None:
    stock = PlanStock()
    came(stock, 25)
    assert stock.wish(KIND, 0.0).count == 24
    for number in range(3):
        stock.put(KIND, [plan("a")] * 8, 0.04 + number * 0.8 * REST_S)
    assert len(stock) == 24


def test_each_plan_is_used_once_in_order_and_told_of() -> None:
    stock = stocked(2)
    taken = [stock.take(KIND, 100, AHEAD_S / 2), stock.take(KIND, 80, AHEAD_S / 2)]
    assert [each.reason for each in taken if each] == ["0", "1"]
    assert stock.take(KIND, 100, AHEAD_S / 2) is None
    wish = stock.wish(KIND, AHEAD_S / 2)
    assert (wish.used, wish.used_tokens) == (2, 180)
    assert stock.wish(KIND, AHEAD_S / 2).used == 0


def test_old_plans_are_not_used() -> None:
    stock = stocked(2)
    assert stock.take(KIND, 100, AHEAD_S) is None
    assert len(stock) == 0


def test_plans_that_were_long_on_their_way_are_no_longer_used_for_it() -> None:
    stock = PlanStock()
    came(stock, 3)
    assert stock.wish(KIND, 0.0).count == 2
    stock.put(KIND, [plan("a"), plan("b")], 0.9 * AHEAD_S)
    assert stock.take(KIND, 100, 0.95 * AHEAD_S) is not None
    assert stock.take(KIND, 100, AHEAD_S) is None


def test_more_plans_than_were_wished_for_are_dropped() -> None:
    stock = PlanStock()
    came(stock, 3)
    assert stock.wish(KIND, 0.0).count == 2
    stock.put(KIND, [plan("a")] * 100, 0.0)
    assert len(stock) == 2


def test_plans_are_for_their_kind_alone() -> None:
    stock = stocked(2)
    assert stock.take(KIND._replace(scenario="other"), 100, 0.0) is None
    assert stock.take(KIND._replace(num_tokens=63), 60, 0.0) is None
    assert len(stock) == 2


def test_a_cleared_stock_takes_nothing_that_was_on_its_way() -> None:
    stock = PlanStock()
    came(stock, 3)
    assert stock.wish(KIND, 0.0).count == 2
    stock.clear()
    stock.put(KIND, [plan("late")], 0.0)
    assert len(stock) == 0
    came(stock, 1)
    stock.put(KIND, [plan("late")], 0.0)  # nobody asked for them since
    assert len(stock) == 0


def test_kinds_are_bounded() -> None:
    stock = stocked(3)
    for number in range(1, 2 * MAX_KINDS):
        now = number * AHEAD_S / (4 * MAX_KINDS)
        if number == MAX_KINDS // 2:
            assert stock.take(KIND, 100, now) is not None
        assert stock.take(KIND._replace(scenario=str(number)), 100, now) is None
        # The one that came last so long ago makes room, and no other.
        assert len(stock) == (
            3 if number < MAX_KINDS // 2 else 2 if number < 1.5 * MAX_KINDS - 1 else 0
        )


def test_what_the_scheduler_did_not_hear_is_told_with_the_next_wish() -> None:
    stock = stocked(3)
    assert [stock.take(KIND, tokens, 0.0) for tokens in (100, 70)] == [plan("0"), plan("1")]
    wish = stock.wish(KIND, 0.0)
    assert (wish.used, wish.used_tokens) == (2, 170)
    stock.not_told(wish)
    assert stock.take(KIND, 65, 0.0) == plan("2")
    wish = stock.wish(KIND, 0.0)
    assert (wish.used, wish.used_tokens) == (3, 235)
    assert stock.wish(KIND, 0.0).used == 0
