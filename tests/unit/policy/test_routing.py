from __future__ import annotations

import dataclasses
import random
from typing import Any

from kvmesh.core.details import FleetWorker
from kvmesh.core.pace import PaceRoom, StepPace
from kvmesh.core.types import (
    Candidate,
    Placement,
    Refusal,
    RefusalReason,
    Role,
    RoutePlan,
    RouteQuery,
    WorkerId,
)
from kvmesh.policy.prefix_source import FetchPace
from kvmesh.policy.ranking import DECODE_CACHE_WEIGHT, decode_cost
from kvmesh.policy.routing import plan_route, plan_without_scheduler
from kvmesh.policy.seats import SILENT_AFTER_S
from kvmesh.policy.view import FleetView, WorkerView
from tests.unit.policy.fleet_examples import LAYOUT, NOW, POLICIES, fleet, query, worker


def plan(
    view: FleetView,
    asked: RouteQuery | None = None,
    matches: dict[str, int] | None = None,
    policy: str = "cache_load",
) -> RoutePlan:
    outcome = decide(view, asked, matches, policy)
    assert isinstance(outcome, RoutePlan), outcome
    return outcome


def refused(view: FleetView, asked: RouteQuery | None = None) -> Refusal:
    outcome = decide(view, asked)
    assert isinstance(outcome, Refusal), outcome
    return outcome


def decide(
    view: FleetView,
    asked: RouteQuery | None = None,
    matches: dict[str, int] | None = None,
    policy: str = "cache_load",
) -> RoutePlan | Refusal:
    held = {WorkerId(name): blocks for name, blocks in (matches or {}).items()}
    return plan_route(view, asked or query(), held, NOW, random.Random(0), POLICIES[policy])


def names(candidates: tuple[Candidate, ...]) -> list[str]:
    return [candidate.worker_id for candidate in candidates]


class TestPlacement:
    def test_prefill_and_decode_worker_are_used_apart(self) -> None:
        made = plan(fleet(worker("p"), worker("d", Role.DECODE)))
        assert made.placement is Placement.DISAGGREGATED
        assert (names(made.prefill), names(made.decode)) == (["p"], ["d"])

    def test_hybrid_takes_the_missing_side(self) -> None:
        made = plan(fleet(worker("p"), worker("h", Role.HYBRID)))
        assert (names(made.prefill), names(made.decode)) == (["p"], ["h"])
        made = plan(fleet(worker("d", Role.DECODE), worker("h", Role.HYBRID)))
        assert (names(made.prefill), names(made.decode)) == (["h"], ["d"])

    def test_hybrid_helps_the_busy_side(self) -> None:
        decode, hybrid = worker("d", Role.DECODE), worker("h", Role.HYBRID)
        made = plan(fleet(worker("p", prefill_active=4), decode, hybrid))
        assert (names(made.prefill), names(made.decode)) == (["h", "p"], ["d"])
        full = worker("d", Role.DECODE, decode_running=8)
        made = plan(fleet(worker("p"), full, hybrid))
        assert (names(made.prefill), names(made.decode)) == (["p"], ["h", "d"])

    def test_hybrids_alone_are_aggregated_unless_asked_otherwise(self) -> None:
        hybrids = fleet(worker("h1", Role.HYBRID), worker("h2", Role.HYBRID))
        made = plan(hybrids)
        assert made.placement is Placement.AGGREGATED
        assert set(names(made.prefill)) == {"h1", "h2"}
        assert made.decode == ()
        apart = plan(hybrids, query(placement=Placement.DISAGGREGATED))
        assert {*names(apart.prefill)} ^ {*names(apart.decode)} == {"h1", "h2"}

    def test_one_role_alone_is_aggregated_and_says_so(self) -> None:
        made = plan(fleet(worker("p1"), worker("p2")))
        assert made.placement is Placement.AGGREGATED
        assert "no decode worker besides 2 prefill" in made.reason

    def test_hybrids_come_before_dedicated_workers_when_aggregated(self) -> None:
        busy_hybrid = worker("h", Role.HYBRID, prefill_active=4)
        view = fleet(worker("p"), busy_hybrid, worker("d", Role.DECODE))
        made = plan(view, query(placement=Placement.AGGREGATED))
        assert names(made.prefill)[0] == "h"

    def test_sides_in_different_clusters_are_aggregated_unless_asked_otherwise(self) -> None:
        view = fleet(worker("p"), worker("d", Role.DECODE, cluster="west"))
        assert plan(view).placement is Placement.AGGREGATED
        assert "cluster" in plan(view).reason
        apart = plan(view, query(placement=Placement.DISAGGREGATED))
        assert (names(apart.prefill), names(apart.decode)) == (["p"], ["d"])

    def test_layouts_are_never_mixed(self) -> None:
        other = dataclasses.replace(LAYOUT, dtype="bfloat16")
        view = fleet(
            worker("p1", prefill_active=3),
            worker("p2", layout=other),
            worker("d1", Role.DECODE),
            worker("d2", Role.DECODE, layout=other),
            worker("d3", Role.DECODE),
        )
        made = plan(view)
        assert (names(made.prefill), names(made.decode)) == (["p2"], ["d2"])

    def test_disaggregated_without_a_pair_is_refused_with_what_there_is(self) -> None:
        refusal = refused(fleet(worker("p")), query(placement=Placement.DISAGGREGATED))
        assert refusal.reason is RefusalReason.NO_WORKERS
        assert "1 prefill" in refusal.message


class TestHybridsUnderLimits:
    """A prompt of 320 tokens takes 0.32 s."""

    LOOSE = PaceRoom(StepPace(0.01, 1e-7), 5000, strictest_s=0.1, spare_s=0.5)
    TIGHT = PaceRoom(StepPace(0.01, 1e-7), 5000, strictest_s=0.03, spare_s=0.05)

    def plan(
        self, *workers: WorkerView, asked: RouteQuery | None = None, policy: str = "kvmesh"
    ) -> RoutePlan:
        view = dataclasses.replace(fleet(*workers), pace=FetchPace(1e-3))
        return plan(view, asked or query(tpot_s=0.03), policy=policy)

    def decoding(
        self, name: str, room: PaceRoom = TIGHT, running: int = 2, **changes: Any
    ) -> WorkerView:
        return worker(name, Role.HYBRID, decode_running=running, room=room, **changes)

    def test_loose_limits_make_them_mixed_workers(self) -> None:
        others = [worker(f"h{n}", Role.HYBRID, prefill_active=1) for n in (1, 2)]
        made = self.plan(self.decoding("h0", self.LOOSE), *others)
        assert made.placement is Placement.AGGREGATED
        assert set(names(made.prefill)) == {"h0", "h1", "h2"}

    def test_tight_limits_keep_those_that_decode_for_decoding(self) -> None:
        idle = [worker(f"h{n}", Role.HYBRID) for n in (1, 2)]
        made = self.plan(self.decoding("h0"), *idle)
        assert made.placement is Placement.DISAGGREGATED
        assert set(names(made.prefill)) == {"h1", "h2"}
        assert names(made.decode) == ["h0"]
        assert "limits keep it from decode on h0" in made.reason

    def test_the_fullest_decodes_so_that_others_become_free(self) -> None:
        two = self.decoding("h0", running=2), self.decoding("h1", running=5)
        made = self.plan(*two, worker("h2", Role.HYBRID))
        assert (names(made.prefill), names(made.decode)) == (["h2"], ["h1", "h0"])

    def test_another_one_decodes_where_nobody_takes_one_more(self) -> None:
        full = dataclasses.replace(self.TIGHT, context_tokens=169_900)
        made = self.plan(self.decoding("h0", full), worker("h1", Role.HYBRID))
        assert made.placement is Placement.AGGREGATED
        assert names(made.prefill) == ["h1"]

    def test_one_that_no_report_shows_counts(self) -> None:
        unseen = worker("h1", Role.HYBRID, decode_in_flight=1)
        made = self.plan(self.decoding("h0"), unseen, worker("h2", Role.HYBRID))
        assert names(made.prefill) == ["h2"]
        assert names(made.decode) == ["h0", "h1"]

    def test_who_still_computes_longer_does_not_decode_it(self) -> None:
        busy = dataclasses.replace(self.decoding("h0", prefill_active=1), pending_tokens=900)
        made = self.plan(busy, worker("h1", Role.HYBRID))
        assert made.placement is Placement.AGGREGATED
        assert names(made.prefill) == ["h1"]

    def test_with_all_in_need_the_prompt_is_computed_somewhere(self) -> None:
        made = self.plan(self.decoding("h0"), self.decoding("h1"))
        assert made.placement is Placement.AGGREGATED
        assert set(names(made.prefill)) == {"h0", "h1"}

    def test_other_policies_know_nothing_of_it(self) -> None:
        made = self.plan(self.decoding("h0"), worker("h1", Role.HYBRID), policy="cache_load")
        assert made.placement is Placement.AGGREGATED
        assert set(names(made.prefill)) == {"h0", "h1"}


class TestPrefillOrder:
    def test_who_still_decodes_under_a_limit_is_asked_only_where_nobody_else_is(self) -> None:
        hurried = PaceRoom(StepPace(0.02), 5000, strictest_s=0.03, spare_s=0.01)
        came_over = worker("a", decode_running=2, room=hurried)
        view = dataclasses.replace(
            fleet(came_over, worker("b", prefill_active=3), worker("d", Role.DECODE)),
            pace=FetchPace(1e-3),
        )
        assert names(plan(view).prefill) == ["b"]
        alone = dataclasses.replace(view, workers=(came_over, worker("d", Role.DECODE)))
        assert names(plan(alone).prefill) == ["a"]
        patient = worker("a", decode_running=2, room=dataclasses.replace(hurried, spare_s=10.0))
        assert (
            names(plan(dataclasses.replace(view, workers=(patient, *view.workers[1:]))).prefill)[0]
            == "a"
        )

    view_of_two = staticmethod(
        lambda **p1: fleet(worker("p1", **p1), worker("p2"), worker("d", Role.DECODE))
    )

    def test_long_hit_beats_a_little_load(self) -> None:
        made = plan(self.view_of_two(prefill_active=1), matches={"p1": 15})
        assert names(made.prefill) == ["p1", "p2"]
        assert made.prefill[0].cached_tokens == 240

    def test_short_hit_does_not(self) -> None:
        made = plan(self.view_of_two(prefill_active=1), matches={"p1": 5})
        assert names(made.prefill) == ["p2", "p1"]

    def test_busy_worker_comes_later_whatever_it_holds(self) -> None:
        made = plan(self.view_of_two(prefill_active=4), matches={"p1": 20})
        assert names(made.prefill) == ["p2", "p1"]

    def test_requests_on_their_way_count(self) -> None:
        made = plan(self.view_of_two(prefill_in_flight=4), matches={"p1": 20})
        assert names(made.prefill) == ["p2", "p1"]

    def test_avoided_worker_is_last_but_there(self) -> None:
        made = plan(self.view_of_two(), query(avoid={"p1"}), {"p1": 20})
        assert names(made.prefill) == ["p2", "p1"]
        only = fleet(worker("p1"), worker("d", Role.DECODE))
        assert names(plan(only, query(avoid={"p1"})).prefill) == ["p1"]

    def test_silent_worker_comes_after_the_others(self) -> None:
        view = self.view_of_two(reported_at=NOW - SILENT_AFTER_S - 0.1)
        assert names(plan(view, matches={"p1": 20}).prefill) == ["p2", "p1"]

    def test_hit_counts_no_more_than_the_prompt(self) -> None:
        made = plan(self.view_of_two(), query(num_tokens=40), {"p1": 3})
        assert made.prefill[0].cached_tokens == 40


class TestDecodeOrder:
    @staticmethod
    def first(**d1: int) -> str:
        view = fleet(worker("p"), worker("d1", Role.DECODE, **d1), worker("d2", Role.DECODE))
        return names(plan(view, matches={"d1": 10}).decode)[0]

    def test_held_prefix_decides_between_equals(self) -> None:
        assert self.first() == "d1"

    def test_free_slots_and_blocks_outweigh_it(self) -> None:
        assert self.first(decode_running=4) == "d2"
        assert self.first(decode_reserved=4) == "d2"
        assert self.first(decode_preempted=4) == "d2"
        assert self.first(decode_in_flight=4) == "d2"
        assert self.first(blocks_free=128) == "d2"

    def test_worker_without_room_is_last(self) -> None:
        full = {"decode_slots": 4, "decode_running": 4}
        assert self.first(**full) == "d2"
        # 20 blocks of prompt and one to grow, 10 of them cached, do not fit twice into 20.
        assert self.first(num_blocks=20, blocks_free=20, decode_in_flight=1) == "d2"


class TestClusters:
    def test_home_has_decode_room_and_its_workers_come_first(self) -> None:
        view = fleet(
            worker("pe"),
            worker("de", Role.DECODE, decode_running=8),
            worker("pw", cluster="west", prefill_active=2),
            worker("dw", Role.DECODE, cluster="west"),
        )
        made = plan(view)
        assert names(made.prefill) == ["pw", "pe"]
        assert names(made.decode) == ["dw", "de"]

    def test_a_group_without_decode_room_is_no_measure(self) -> None:
        """The worker that was chosen is asked however soon one of the other group would be."""
        late = dataclasses.replace(worker("pw", cluster="west"), pending_tokens=9000)
        view = fleet(
            worker("pe"),
            worker("de", Role.DECODE, decode_running=8),
            late,
            worker("dw", Role.DECODE, cluster="west"),
        )
        made = plan(view, query(3000, placement=Placement.DISAGGREGATED), policy="kvmesh")
        assert names(made.prefill) == ["pw", "pe"]
        assert names(made.decode) == ["dw", "de"]


class TestRefusals:
    def test_empty_fleet(self) -> None:
        refusal = refused(fleet())
        assert refusal.reason is RefusalReason.NO_WORKERS
        assert "no worker is registered" in refusal.message
        assert refusal.retry_after_ms > 0

    def test_unknown_model_names_the_known_ones(self) -> None:
        refusal = refused(fleet(worker("p"), worker("q", model="n")), query(model="x"))
        assert refusal.reason is RefusalReason.NO_WORKERS
        assert "served are m, n" in refusal.message

    def test_draining_fleet(self) -> None:
        refusal = refused(fleet(worker("p", draining=True)))
        assert refusal.reason is RefusalReason.NO_WORKERS
        assert "draining" in refusal.message

    def test_too_long_names_the_limit(self) -> None:
        small = worker("p", num_blocks=20)
        refusal = refused(fleet(small), query(num_tokens=321))
        assert refusal.reason is RefusalReason.TOO_LONG
        assert "320" in refusal.message

    def test_worker_that_is_too_small_is_left_out(self) -> None:
        view = fleet(worker("p1", max_model_len=100), worker("p2"), worker("d", Role.DECODE))
        assert names(plan(view).prefill) == ["p2"]


class TestBaselines:
    def test_round_robin_takes_turns(self) -> None:
        workers = [worker(f"p{i}", prefill_active=i) for i in range(3)]
        decoders = [worker(f"d{i}", Role.DECODE) for i in range(2)]
        made = [
            plan(fleet(*workers, *decoders, num_routes=turn), policy="round_robin")
            for turn in range(4)
        ]
        assert [names(each.prefill)[0] for each in made] == ["p0", "p1", "p2", "p0"]
        assert [names(each.decode)[0] for each in made] == ["d0", "d1", "d0", "d1"]
        assert made[0].policy == "round_robin"

    def test_least_loaded_ignores_the_cache(self) -> None:
        view = fleet(worker("p1", prefill_active=1), worker("p2"), worker("d", Role.DECODE))
        assert names(plan(view, matches={"p1": 20}, policy="least_loaded").prefill)[0] == "p2"


class TestWithoutScheduler:
    @staticmethod
    def plan(*in_flight: tuple[str, int], **p1: int) -> RoutePlan:
        views = (worker("p1", Role.PREFILL, **p1), worker("p2"), worker("d", Role.DECODE))
        workers = tuple(FleetWorker(view.info, view.load) for view in views)
        counts = {WorkerId(name): count for name, count in in_flight}
        outcome = plan_without_scheduler(workers, query(), counts)
        assert isinstance(outcome, RoutePlan)
        return outcome

    def test_fewest_own_requests_first(self) -> None:
        assert names(self.plan(("p1", 1)).prefill) == ["p2", "p1"]
        assert names(self.plan(("p2", 1)).prefill) == ["p1", "p2"]

    def test_old_loads_do_not_count(self) -> None:
        assert names(self.plan(("p2", 1), prefill_active=4).prefill) == ["p1", "p2"]

    def test_knows_nothing_of_caches_and_says_so(self) -> None:
        made = self.plan()
        assert not made.cache_known
        assert made.policy == "least_connections"

    def test_draining_is_believed(self) -> None:
        assert names(self.plan(draining=True).prefill) == ["p2"]

    def test_no_worker_is_a_refusal(self) -> None:
        outcome = plan_without_scheduler((), query(), {})
        assert isinstance(outcome, Refusal)
        assert outcome.reason is RefusalReason.NO_WORKERS


def test_a_prefix_counts_for_less_on_a_fuller_decode_worker() -> None:
    assert decode_cost(0.0, 1.0) == DECODE_CACHE_WEIGHT, "as much as half of a worker"
    assert decode_cost(0.7, 0.0) > decode_cost(0.2, 1.0), "the batch of the holder is too full"
    assert decode_cost(0.4, 0.0) < decode_cost(0.2, 1.0)
    assert decode_cost(1.2, 0.0) == decode_cost(1.2, 1.0), "beyond its capacity nothing else counts"
