from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.policy.fair_share import MAX_HEADS, MIN_HEADS, Claim, FairQueue, head_pauses


def serve(queue: FairQueue, count: int) -> list[str]:
    """Names placed one after the other, always the first head."""
    order = []
    for _ in range(count):
        name = str(queue.heads()[0])
        queue.placed(name)
        order.append(name)
    return order


def filled(**claims: tuple[int, Claim]) -> FairQueue:
    queue = FairQueue()
    for prefix, (count, claim) in claims.items():
        for number in range(count):
            queue.add(f"{prefix}{number}", claim)
    return queue


def shares(order: list[str]) -> Counter[str]:
    return Counter(name[0] for name in order)


def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    queue = filled(a=(500, Claim("a", 100)))
    serve(queue, 50)
    for number in range(3):
        queue.add(f"b{number}", Claim("b", 100))
    assert shares(serve(queue, 6)) == {"a": 3, "b": 3}


def test_one_tenant_alone_is_served_in_order_of_arrival() -> None:
    queue = filled(a=(5, Claim("a", 7)))
    assert serve(queue, 5) == ["a0", "a1", "a2", "a3", "a4"]
    assert len(queue) == 0
    assert queue.heads() == []


def test_shares_follow_weights() -> None:
    queue = filled(a=(100, Claim("a", 10, weight=3.0)), b=(100, Claim("b", 10, weight=1.0)))
    assert shares(serve(queue, 80)) == {"a": 60, "b": 20}


def test_shares_are_of_tokens_not_of_requests() -> None:
    queue = filled(a=(100, Claim("a", 300)), b=(100, Claim("b", 100)))
    assert shares(serve(queue, 80)) == {"a": 20, "b": 60}


def test_rest_is_not_saved_up() -> None:
    queue = filled(a=(100, Claim("a", 10)))
    serve(queue, 60)  # b was away
    for number in range(40):
        queue.add(f"b{number}", Claim("b", 10))
    assert shares(serve(queue, 20)) == {"a": 10, "b": 10}


def test_a_higher_priority_goes_first_whatever_the_shares_are() -> None:
    queue = filled(a=(5, Claim("a", 1, weight=100)), b=(2, Claim("b", 9, priority=1)))
    assert shares(serve(queue, 2)) == {"b": 2}


def test_rank_orders_within_a_tenant_only() -> None:
    queue = filled(a=(2, Claim("a", 10, rank=5)), b=(1, Claim("b", 10, rank=0)))
    queue.add("a9", Claim("a", 10, rank=-1))
    order = serve(queue, 4)
    assert [name for name in order if name[0] == "a"] == ["a9", "a0", "a1"]
    assert order.index("b0") <= 1


def test_leaving_without_a_worker_costs_nothing() -> None:
    queue = filled(a=(20, Claim("a", 10)), b=(10, Claim("b", 10)))
    for number in range(10):
        queue.left(f"a{number}")
    assert shares(serve(queue, 10)) == {"a": 5, "b": 5}


def test_the_number_of_heads_adapts_within_its_bounds() -> None:
    queue = filled(a=(400, Claim("a", 1)))
    assert len(queue.heads()) == MIN_HEADS
    serve(queue, 100)
    assert len(queue.heads()) == MAX_HEADS
    for _ in range(100):
        queue.missed("a399")
    assert len(queue.heads()) == MIN_HEADS


def test_heads_are_found_anew_only_after_a_change() -> None:
    queue = filled(a=(400, Claim("a", 1)))
    serve(queue, 10)
    heads = queue.heads()
    assert queue.heads() is heads
    queue.missed(heads[0])
    assert queue.heads() == heads[:-1]
    for _ in range(100):
        queue.missed(heads[0])
    fewest = queue.heads()
    queue.missed(heads[0])
    assert queue.heads() is fewest
    queue.left(fewest[0])
    assert list(queue.heads()[:-1]) == list(fewest[1:])


def test_heads_stand_in_the_order_in_which_they_will_be_placed() -> None:
    queue = filled(
        a=(3, Claim("a", 30, weight=2.0)), b=(3, Claim("b", 10)), c=(2, Claim("c", 5, weight=0.25))
    )
    serve(queue, 8 - MIN_HEADS)  # so that all that are left are heads
    heads = [str(name) for name in queue.heads()]
    assert len(heads) == MIN_HEADS
    assert heads == serve(queue, MIN_HEADS)


def test_equal_starts_go_in_the_order_of_arrival() -> None:
    queue = FairQueue()
    for name in ("b0", "a0", "a1", "b1"):
        queue.add(name, Claim(name[0], 10))
    assert queue.heads() == ["b0", "a0", "a1", "b1"]


def test_requests_for_one_cluster_do_not_hold_up_those_for_the_other() -> None:
    queue = filled(h=(20, Claim("a", 1)))
    queue.waits_for("h0", remote=False)
    assert queue.heads() == ["h0", "h1", "h2", "h3"], "one line while there is one cluster"
    queue.split()
    queue.add("r0", Claim("a", 1))
    for number in (0, 1, *range(3, 20)):
        queue.waits_for(f"h{number}", remote=False)
    assert set(queue.heads()) == {"h2", "r0", "h0", "h1", "h3", "h4"}
    queue.waits_for("r0", remote=True)
    queue.waits_for("h2", remote=True)
    for _ in range(40):
        queue.missed("h0")
    assert set(queue.heads()) == {"h2", "r0", "h0", "h1", "h3", "h4"}
    queue.waits_for("h2", remote=False)
    assert set(queue.heads()) == {"r0", "h0", "h1", "h2", "h3"}, "its place is by arrival"


def test_the_number_of_heads_adapts_for_each_cluster() -> None:
    queue = FairQueue()
    queue.split()
    for number in range(200):
        queue.add(f"h{number}", Claim("a", 1))
        queue.add(f"r{number}", Claim("a", 1))
        queue.waits_for(f"r{number}", remote=True)
        queue.waits_for(f"h{number}", remote=False)
    for number in range(10):
        queue.placed(f"r{number}")
        queue.missed(f"h{number}")
    assert shares([str(name) for name in queue.heads()]) == {"h": MIN_HEADS, "r": MIN_HEADS + 10}


@given(st.lists(st.tuples(st.sampled_from("aplfn"), st.integers(0, 3), st.integers(1, 50))))
def test_somebody_always_has_a_turn_and_all_leave(steps: list[tuple[str, int, int]]) -> None:
    queue, names = FairQueue(), 0
    waiting: list[str] = []
    for action, tenant, cost in steps:
        if action == "a":
            names += 1
            waiting.append(f"r{names}")
            queue.add(waiting[-1], Claim(f"t{tenant}", cost, 1 + tenant, tenant % 2, cost % 3))
        elif waiting and action in "fn":
            queue.split()
            queue.waits_for(waiting[cost % len(waiting)], remote=action == "f")
        elif waiting:
            name = str(queue.heads()[0]) if action == "p" else waiting[tenant % len(waiting)]
            (queue.placed if action == "p" else queue.left)(name)
            waiting.remove(name)
        heads = queue.heads()
        assert bool(heads) == bool(waiting)
        assert len(set(heads)) == len(heads)
        assert set(heads) <= set(waiting)
    for name in waiting:
        queue.left(name)
    assert len(queue) == 0


def test_a_name_waits_once() -> None:
    queue = filled(a=(1, Claim("a", 1)))
    with pytest.raises(AssertionError):
        queue.add("a0", Claim("a", 1))


@pytest.mark.parametrize("count", [1, 2, MIN_HEADS, MAX_HEADS])
def test_heads_ask_by_their_place_and_together_as_often_as_equal_ones(count: int) -> None:
    pauses = head_pauses(count)
    assert sum(1 / each for each in pauses) == pytest.approx(count)
    assert list(pauses) == sorted(pauses)
    assert pauses[-1] / pauses[0] <= 8
    assert pauses[-1] / pauses[0] == pytest.approx(min(2 ** (count - 1), 8)), "half as often each"


def test_the_pace_of_one_line_is_by_the_place_in_it() -> None:
    queue = filled(a=(20, Claim("a", 1)))
    for number in range(10):
        queue.waits_for(f"a{number}", remote=True)  # there is one line
    queue.split()
    for number in range(20):
        queue.waits_for(f"a{number}", remote=number >= 10)
    home, far = (queue.pace(name) for name in ("a0", "a10"))
    assert home == far == pytest.approx(head_pauses(MIN_HEADS)[0] * 2 * MIN_HEADS / 20)
    assert queue.pace("a9") == pytest.approx(head_pauses(MIN_HEADS)[-1] * 2 * MIN_HEADS / 20)
