from __future__ import annotations

import dataclasses
import random

from kvmesh.core.types import (
    Placement,
    Refusal,
    RefusalReason,
    Role,
    RoutePlan,
    RouteQuery,
    WorkerId,
)
from kvmesh.policy.offload import OffloadReason, OffloadState
from kvmesh.policy.offload_route import OffloadPlan, plan_offload
from kvmesh.policy.prefix_source import FetchPace
from kvmesh.policy.view import WorkerView
from tests.unit.policy.fleet_examples import NOW, POLICIES, fleet, query, worker

FAR = worker("far", cluster="far")
NEAR = (worker("p"), worker("d", Role.DECODE))
OUT, BACK = ("east", "far"), ("far", "east")
FAST_S, SLOW_S = 5e-5, 9e-4
"""A token's KV travels in 5 % and 90 % of the time in which it is computed."""

WIDE = FetchPace(1e-3, 1e-5, {OUT: FAST_S, BACK: FAST_S})


def decide(
    *workers: WorkerView, asked: RouteQuery | None = None, matches: dict[str, int] | None = None
) -> OffloadPlan:
    held = None if matches is None else {WorkerId(name): n for name, n in matches.items()}
    return plan_offload(
        fleet(*workers),
        asked or query(),
        held,
        NOW,
        random.Random(0),
        POLICIES["cache_load"],
        OffloadState("far", 400),
    )


def route(plan: OffloadPlan) -> RoutePlan:
    assert isinstance(plan.route, RoutePlan), plan.route
    return plan.route


def test_long_prompts_are_prefilled_far_and_decoded_at_home() -> None:
    plan = decide(FAR, *NEAR, asked=query(500))
    assert plan.choice is not None
    assert plan.choice.reason is OffloadReason.LONG
    assert [c.worker_id for c in route(plan).prefill] == ["far"]
    assert [c.worker_id for c in route(plan).decode] == ["d"]
    assert route(plan).placement is Placement.DISAGGREGATED


def test_short_prompts_stay() -> None:
    plan = decide(FAR, *NEAR, asked=query(300))
    assert [c.worker_id for c in route(plan).prefill] == ["p"]


def test_only_the_uncached_part_counts() -> None:
    plan = decide(FAR, *NEAR, asked=query(500), matches={"p": 10})
    assert plan.choice is not None
    assert (plan.choice.remote, plan.choice.uncached_tokens) == (False, 340)
    assert route(plan).prefill[0].cached_tokens == 160


def test_what_a_decode_worker_at_home_holds_counts() -> None:
    """The second turn of a conversation, whose first answer was generated there."""
    plan = decide(FAR, *NEAR, asked=query(1540), matches={"d": 94})
    assert plan.choice is not None
    assert plan.choice.reason is OffloadReason.SHORT
    assert (plan.choice.compared_tokens, plan.choice.uncached_tokens) == (36, 36)
    workers = [each.worker_id for each in (*route(plan).prefill, *route(plan).decode)]
    assert "far" not in workers


def test_the_comparison_is_told_apart_from_what_is_left_to_compute() -> None:
    plan = decide(FAR, *NEAR, asked=query(1000), matches={"far": 50, "d": 10})
    assert plan.choice is not None
    assert plan.choice.remote
    assert (plan.choice.compared_tokens, plan.choice.uncached_tokens) == (840, 200)


def test_a_far_cache_does_not_keep_a_prompt_at_home() -> None:
    plan = decide(FAR, *NEAR, asked=query(500), matches={"far": 10})
    assert plan.choice is not None
    assert plan.choice.remote


def test_a_draining_far_cluster_gets_nothing() -> None:
    plan = decide(worker("far", cluster="far", draining=True), *NEAR, asked=query(500))
    assert plan.choice is not None
    assert plan.choice.reason is OffloadReason.REMOTE_DOWN
    assert [c.worker_id for c in route(plan).prefill] == ["p"]


def test_what_was_lost_on_the_way_home_is_computed_at_home() -> None:
    """By another far worker it would have to come over the same link."""
    others = (worker("far-2", cluster="far"), *NEAR)
    refused = dataclasses.replace(query(500), avoid=frozenset({FAR.worker_id}))
    assert route(decide(FAR, *others, asked=refused)).prefill[0].worker_id == "far-2"
    lost = dataclasses.replace(refused, lost=refused.avoid)
    plan = decide(FAR, *others, asked=lost)
    assert plan.choice is not None
    assert plan.choice.reason is OffloadReason.REMOTE_DOWN
    assert [c.worker_id for c in route(plan).prefill] == ["p"]
    # A worker that is gone took what failed with it.
    assert [c.worker_id for c in route(decide(*others, asked=lost)).prefill] == ["far-2"]
    # With nobody at home the link is the only way.
    assert route(decide(*others[:1], FAR, NEAR[1], asked=lost)).prefill[0].worker_id == "far-2"


def test_what_waits_for_the_link_is_computed_at_home_by_who_idles() -> None:
    sends = worker("far", cluster="far", prefill_active=4, prefill_sending=4)
    refused = query(500, avoid=("far",))
    plan = decide(sends, *NEAR, asked=refused)
    assert plan.choice is not None
    assert plan.choice.reason is OffloadReason.REMOTE_DOWN
    assert [c.worker_id for c in route(plan).prefill] == ["p"]
    # Before it was refused it is offered, and one that computes will soon be free.
    computes = worker("far", cluster="far", prefill_active=4, prefill_sending=3)
    assert route(decide(sends, *NEAR, asked=query(500))).prefill[0].worker_id == "far"
    assert route(decide(computes, *NEAR, asked=refused)).prefill[0].worker_id == "far"
    # One of them that has not refused is asked first.
    others = (worker("far-2", cluster="far"), *NEAR)
    assert route(decide(sends, *others, asked=refused)).prefill[0].worker_id == "far-2"
    # Where nobody idles at home, it would take the place of others there.
    for busy in (worker("p", prefill_active=4), worker("p", draining=True)):
        assert route(decide(sends, busy, NEAR[1], asked=refused)).prefill[0].worker_id == "far"
    both = query(500, avoid=("far", "p"))
    assert route(decide(sends, *NEAR, asked=both)).prefill[0].worker_id == "far"


def test_one_far_worker_that_takes_prompts_is_enough() -> None:
    drains = worker("far-2", cluster="far", draining=True)
    plan = decide(FAR, drains, *NEAR, asked=query(500))
    assert [c.worker_id for c in route(plan).prefill] == ["far"]


def test_decode_workers_far_away_are_no_place_to_prefill() -> None:
    plan = decide(worker("far", Role.DECODE, cluster="far"), *NEAR, asked=query(500))
    assert plan.choice is None
    assert [c.worker_id for c in route(plan).prefill] == ["p"]


def test_all_draining_is_no_choice_of_a_cluster() -> None:
    asleep = (worker("far", cluster="far", draining=True), worker("p", draining=True), NEAR[1])
    assert decide(*asleep, asked=query(500)).choice is None


def test_without_local_prefill_short_ones_go_too() -> None:
    plan = decide(FAR, NEAR[1], asked=query(10))
    assert plan.choice is not None
    assert plan.choice.reason is OffloadReason.LOCAL_DOWN
    assert [c.worker_id for c in route(plan).prefill] == ["far"]


def test_one_cluster_is_an_ordinary_route() -> None:
    plan = decide(*NEAR, asked=query(500))
    assert plan.choice is None
    assert [c.worker_id for c in route(plan).prefill] == ["p"]


def test_nobody_at_all() -> None:
    refused = decide().route
    assert isinstance(refused, Refusal)
    assert refused.reason is RefusalReason.NO_WORKERS


def over_a_link(
    asked: RouteQuery,
    held: dict[str, int],
    pace: FetchPace = WIDE,
    *,
    has_room: bool = True,
) -> OffloadPlan:
    """Ours, with workers of both clusters that can be read."""
    view = dataclasses.replace(fleet(FAR, *NEAR), pace=pace)
    matches = {WorkerId(name): n for name, n in held.items()}
    offload = OffloadState("far", 400, link_has_room=has_room)
    return plan_offload(view, asked, matches, NOW, random.Random(0), POLICIES["kvmesh"], offload)


def test_a_prefix_of_home_goes_along_where_the_link_has_room() -> None:
    """Home holds 2,000 of 3,400 tokens, and the link carries a token in 5 % of computing it."""
    plan = over_a_link(query(3400), {"p": 125})
    assert plan.choice is not None
    assert (plan.choice.remote, plan.choice.moved_tokens) == (True, 2000)
    assert (plan.choice.compared_tokens, plan.choice.uncached_tokens) == (1400, 1400)
    first = route(plan).prefill[0]
    assert first.worker_id == "far"
    assert first.source is not None
    assert (first.source.worker_id, first.source.num_blocks) == ("p", 125)
    # Who lends takes nothing.
    assert [c.worker_id for c in route(plan).prefill] == ["far"]


def test_a_prefix_of_the_far_cluster_comes_home_for_a_short_rest() -> None:
    plan = over_a_link(query(1500), {"far": 75})
    assert plan.choice is not None
    assert (plan.choice.remote, plan.choice.moved_tokens) == (False, 1200)
    workers = [*route(plan).prefill, *route(plan).decode]
    assert "far" not in {each.worker_id for each in workers}
    source = route(plan).prefill[0].source
    assert source is not None
    assert source.worker_id == "far"


def one_way(fast: tuple[str, str]) -> FetchPace:
    return FetchPace(1e-3, 1e-5, {ends: FAST_S if ends == fast else SLOW_S for ends in (OUT, BACK)})


def test_a_prefix_of_home_goes_along_only_if_the_link_is_fast_in_its_direction() -> None:
    plan = over_a_link(query(3400), {"p": 125}, one_way(OUT))
    assert plan.choice is not None
    assert (plan.choice.remote, plan.choice.moved_tokens) == (True, 2000)
    plan = over_a_link(query(3400), {"p": 125}, one_way(BACK))
    assert plan.choice is not None
    assert (plan.choice.remote, plan.choice.moved_tokens) == (True, 0)
    assert plan.choice.uncached_tokens == 3400
    assert route(plan).prefill[0].source is None


def test_a_prefix_comes_home_only_if_the_link_is_fast_in_its_direction() -> None:
    plan = over_a_link(query(1500), {"far": 75}, one_way(BACK))
    assert plan.choice is not None
    assert (plan.choice.remote, plan.choice.moved_tokens) == (False, 1200)
    plan = over_a_link(query(1500), {"far": 75}, one_way(OUT))
    assert plan.choice is not None
    assert (plan.choice.remote, plan.choice.moved_tokens) == (True, 0)


def test_a_direction_that_was_not_measured_is_tried() -> None:
    """Only handoffs go over the link by themselves, and none of them out of home."""
    for known in ({}, {BACK: FAST_S}, {BACK: SLOW_S}):
        plan = over_a_link(query(3400), {"p": 125}, FetchPace(1e-3, 1e-5, known))
        assert plan.choice is not None
        assert (plan.choice.remote, plan.choice.moved_tokens) == (True, 2000)
        source = route(plan).prefill[0].source
        assert source is not None


def test_a_full_link_home_stops_only_what_goes_home() -> None:
    plan = over_a_link(query(1500), {"far": 75}, has_room=False)
    assert plan.choice is not None
    assert (plan.choice.remote, plan.choice.moved_tokens) == (True, 0)
    plan = over_a_link(query(3400), {"p": 125}, has_room=False)
    assert plan.choice is not None
    assert (plan.choice.remote, plan.choice.moved_tokens) == (True, 2000)
