from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from kvmesh.core.health import Health
from kvmesh.core.types import (
    Placement,
    Refusal,
    RefusalReason,
    RequestId,
    Role,
    RoutePlan,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)
from kvmesh.policy.groups import GroupKey
from kvmesh.policy.health import HealthReason, Verdict
from kvmesh.policy.routing import plan_route
from kvmesh.policy.seats import SILENT_AFTER_S
from kvmesh.transfer.layouts import layout_words
from services.scheduler.fleet import IN_FLIGHT_S, SETTLE_S, Fleet, Membership
from services.scheduler.member import Taken
from tests.unit.policy.fleet_examples import LAYOUT, query, worker_info

LEASE_S = 3.0


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(LEASE_S)


def join(fleet: Fleet, info: WorkerInfo, now: float = 0.0) -> Membership:
    registered = fleet.register(info, now)
    assert isinstance(registered, Membership)
    return registered


def in_flight(fleet: Fleet, now: float) -> dict[str, tuple[int, int]]:
    return {
        each.worker_id: (each.prefill_in_flight, each.decode_in_flight)
        for each in fleet.view(now).workers
    }


_numbers = itertools.count()


def route(
    fleet: Fleet, now: float, placement: Placement = Placement.AUTO, name: str = "", **asked: Any
) -> RoutePlan:
    """Routes a request, another one without a name."""
    name = name or f"r{next(_numbers)}"
    wanted = query(placement=placement, request_id=RequestId(name), **asked)
    plan = plan_route(fleet.view(now), wanted, None, now, random.Random(0))
    assert isinstance(plan, RoutePlan)
    fleet.note_route(wanted.request_id, plan, now)
    return plan


class TestLayouts:
    def test_a_group_has_one_layout(self, fleet: Fleet) -> None:
        join(fleet, worker_info("a"))
        other = replace(LAYOUT, engine="vllm", order="BLHNC", block_size=32)
        refused = fleet.register(replace(worker_info("b"), layout=other), 0.0)
        assert isinstance(refused, Refusal)
        assert refused.reason is RefusalReason.INVALID
        for words in ("b cannot exchange KV with a", layout_words(LAYOUT), layout_words(other)):
            assert words in refused.message
        assert "vllm BLHNC, float32, rank 0 of 1, blocks of 32" in layout_words(other)

    def test_other_groups_and_later_lives_have_theirs(self, fleet: Fleet) -> None:
        join(fleet, worker_info("a"))
        other = replace(LAYOUT, block_size=32)
        weights = replace(other, model_fingerprint="other weights")
        join(fleet, replace(worker_info("b"), layout=weights))
        join(fleet, replace(worker_info("c"), layout=other, model="other"))
        join(fleet, replace(worker_info("d"), layout=other, scenario="chat"))
        join(fleet, replace(worker_info("a", incarnation=2), layout=other))
        join(fleet, replace(worker_info("e"), layout=other))

    def test_who_left_no_longer_counts(self, fleet: Fleet) -> None:
        other = replace(LAYOUT, block_size=32)
        member = join(fleet, worker_info("a"))
        assert isinstance(fleet.register(replace(worker_info("b"), layout=other), 0.0), Refusal)
        assert fleet.leave(member)
        join(fleet, replace(worker_info("b"), layout=other))
        assert fleet.expire(LEASE_S) == ["b"]
        join(fleet, worker_info("c"))

    def test_clusters_are_one_group(self, fleet: Fleet) -> None:
        join(fleet, worker_info("a"))
        far = replace(worker_info("b"), layout=replace(LAYOUT, tp_size=2), cluster="far")
        assert isinstance(fleet.register(far, 0.0), Refusal)


class TestConfirming:
    def test_a_load_that_is_confirmed_counts_as_reported_now(self, fleet: Fleet) -> None:
        member = join(fleet, worker_info("p"))
        load = WorkerLoad(prefill_active=2, blocks_free=7)
        assert fleet.report(member, load, 1.0)
        version = fleet.version
        assert fleet.confirm(member, 3.5)
        assert fleet.version == version, "no news for watchers"
        (seen,) = fleet.view(3.5).workers
        assert (seen.load, seen.reported_at) == (load, 3.5)
        assert fleet.expire(3.5 + LEASE_S - 0.1) == []
        assert fleet.expire(3.5 + LEASE_S) == ["p"]
        assert not fleet.confirm(member, 7.0)

    def test_it_overtakes_routes_as_a_report_does(self, fleet: Fleet) -> None:
        member = join(fleet, worker_info("h", Role.HYBRID))
        fleet.report(member, WorkerLoad(), 1.0)
        route(fleet, 1.0)
        assert in_flight(fleet, 1.0) == {"h": (1, 1)}
        assert fleet.confirm(member, 1.0 + SETTLE_S)
        assert in_flight(fleet, 1.0 + SETTLE_S) == {"h": (0, 0)}


class TestMembership:
    def test_new_worker_counts_as_idle_and_empty(self, fleet: Fleet) -> None:
        join(fleet, worker_info("p"))
        (seen,) = fleet.view(0.0).workers
        assert seen.load == WorkerLoad(blocks_free=512)

    def test_newer_life_replaces_the_older(self, fleet: Fleet) -> None:
        older = join(fleet, worker_info("p"))
        newer = join(fleet, worker_info("p", incarnation=2))
        assert not fleet.report(older, WorkerLoad(prefill_active=1), 1.0)
        assert not fleet.leave(older)
        assert [each.info.incarnation for each in fleet.workers()] == [2]
        assert fleet.leave(newer)
        assert len(fleet) == 0

    def test_older_life_is_refused(self, fleet: Fleet) -> None:
        join(fleet, worker_info("p", incarnation=2))
        refusal = fleet.register(worker_info("p"), 1.0)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is RefusalReason.STALE

    def test_reconnected_worker_is_not_removed_by_its_old_connection(self, fleet: Fleet) -> None:
        old = join(fleet, worker_info("p"))
        join(fleet, worker_info("p"))
        assert not fleet.leave(old)
        assert len(fleet) == 1

    def test_worker_without_blocks_is_refused(self, fleet: Fleet) -> None:
        refusal = fleet.register(worker_info("p", num_blocks=0), 0.0)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is RefusalReason.INVALID

    def test_counts_and_fingerprints(self, fleet: Fleet) -> None:
        join(fleet, worker_info("p"))
        join(fleet, worker_info("d", Role.DECODE))
        join(fleet, worker_info("x", Role.DECODE, model="n"))
        one, other = (GroupKey.of(worker_info("w", model=model)) for model in ("m", "n"))
        counts = {(one, Role.PREFILL): 1, (one, Role.DECODE): 1, (other, Role.DECODE): 1}
        assert fleet.count_by_group() == counts
        assert fleet.fingerprints("m") == {LAYOUT.model_fingerprint}
        assert fleet.fingerprints("unknown") == set()


class TestLease:
    def test_silent_worker_is_removed_when_its_lease_ends(self, fleet: Fleet) -> None:
        join(fleet, worker_info("p"))
        talking = join(fleet, worker_info("q"))
        assert fleet.report(talking, WorkerLoad(), 2.0)
        assert fleet.expire(LEASE_S - 0.1) == []
        assert fleet.expire(LEASE_S) == ["p"]
        assert [each.info.worker_id for each in fleet.workers()] == ["q"]

    def test_restored_worker_goes_unless_it_registers(self, fleet: Fleet) -> None:
        assert fleet.restore(worker_info("p"), 0.0)
        assert fleet.restore(worker_info("q"), 0.0)
        assert list(fleet.confirmed()) == []
        join(fleet, worker_info("p"), 1.0)
        assert [each.worker_id for each in fleet.confirmed()] == ["p"]
        assert not fleet.restore(worker_info("p"), 1.0), "what registered is newer"
        assert fleet.expire(LEASE_S) == ["q"]


class TestVersions:
    def test_load_alone_is_not_urgent(self, fleet: Fleet) -> None:
        member = join(fleet, worker_info("p"))
        version, urgent = fleet.version, fleet.urgent_version
        assert fleet.report(member, WorkerLoad(prefill_active=1), 1.0)
        assert (fleet.version > version, fleet.urgent_version) == (True, urgent)

    def test_draining_is_urgent(self, fleet: Fleet) -> None:
        member = join(fleet, worker_info("p"))
        urgent = fleet.urgent_version
        assert fleet.report(member, WorkerLoad(draining=True), 1.0)
        assert fleet.urgent_version > urgent

    def test_same_load_again_is_no_change(self, fleet: Fleet) -> None:
        member = join(fleet, worker_info("p"))
        fleet.report(member, WorkerLoad(), 1.0)
        version = fleet.version
        assert fleet.report(member, WorkerLoad(), 2.0)
        assert fleet.version == version


class TestInFlight:
    def test_plan_counts_on_both_sides_until_it_is_old(self, fleet: Fleet) -> None:
        join(fleet, worker_info("p"))
        join(fleet, worker_info("d", Role.DECODE))
        route(fleet, 10.0)
        assert in_flight(fleet, 10.0) == {"p": (1, 0), "d": (0, 1)}
        assert in_flight(fleet, 10.0 + IN_FLIGHT_S) == {"p": (0, 0), "d": (0, 0)}
        assert fleet.view(11.0).num_routes == 1

    def test_aggregated_plan_counts_twice_on_one_worker(self, fleet: Fleet) -> None:
        join(fleet, worker_info("h", Role.HYBRID))
        route(fleet, 10.0, Placement.AGGREGATED)
        assert in_flight(fleet, 10.0) == {WorkerId("h"): (1, 1)}

    def test_report_takes_over_what_it_can_have_seen(self, fleet: Fleet) -> None:
        member = join(fleet, worker_info("h", Role.HYBRID))
        route(fleet, 10.0)
        route(fleet, 10.0 + SETTLE_S)
        fleet.report(member, WorkerLoad(prefill_active=1), 10.0 + 1.5 * SETTLE_S)
        assert in_flight(fleet, 10.0 + 1.5 * SETTLE_S) == {"h": (1, 1)}

    def test_a_report_that_names_requests_takes_them_over_at_once(self, fleet: Fleet) -> None:
        member = join(fleet, worker_info("h", Role.HYBRID))
        route(fleet, 10.0, name="mine")
        route(fleet, 10.001, name="other")
        mine = (RequestId("mine"), RequestId("of another scheduler"))
        fleet.report(member, WorkerLoad(decode_reserved=1), 10.01, Taken(reservations=mine))
        assert in_flight(fleet, 10.01) == {"h": (2, 1)}
        load = WorkerLoad(decode_reserved=1, prefill_active=1)
        fleet.report(member, load, 10.02, Taken(prompts=mine))
        assert in_flight(fleet, 10.02) == {"h": (1, 1)}
        fleet.report(member, load, 10.03, Taken(mine, mine))
        assert in_flight(fleet, 10.03) == {"h": (1, 1)}, "once each"

    def test_a_request_that_another_candidate_took_counts_there_alone(self, fleet: Fleet) -> None:
        members = {name: join(fleet, worker_info(name)) for name in ("p1", "p2")}
        join(fleet, worker_info("d", Role.DECODE))
        first = route(fleet, 10.0, name="mine").prefill[0].worker_id
        second = "p2" if first == "p1" else "p1"
        taken = Taken(prompts=(RequestId("mine"),))
        fleet.report(members[second], WorkerLoad(prefill_active=1), 10.01, taken)
        assert in_flight(fleet, 10.01) == {"p1": (0, 0), "p2": (0, 0), "d": (0, 1)}

    def test_who_asks_again_counts_where_it_is_sent_now(self, fleet: Fleet) -> None:
        for name in ("p1", "p2"):
            join(fleet, worker_info(name))
        join(fleet, worker_info("d", Role.DECODE))
        refusing = route(fleet, 10.0, name="again").prefill[0].worker_id
        route(fleet, 10.1, name="other", avoid=[refusing])
        plan = route(fleet, 10.2, name="again", avoid=[refusing])
        taken = plan.prefill[0].worker_id
        assert in_flight(fleet, 10.2) == {refusing: (0, 0), taken: (2, 0), "d": (0, 2)}
        # Each for its time.
        assert in_flight(fleet, 10.1 + IN_FLIGHT_S) == {
            refusing: (0, 0),
            taken: (1, 0),
            "d": (0, 1),
        }
        assert in_flight(fleet, 10.2 + IN_FLIGHT_S) == {
            refusing: (0, 0),
            taken: (0, 0),
            "d": (0, 0),
        }

    def test_what_a_report_took_over_is_not_taken_back(self, fleet: Fleet) -> None:
        member = join(fleet, worker_info("h", Role.HYBRID))
        route(fleet, 10.0, name="again")
        fleet.report(member, WorkerLoad(prefill_active=1), 10.0 + 2 * SETTLE_S)
        route(fleet, 10.0 + 2 * SETTLE_S, name="other")
        fleet.withdraw(RequestId("again"))
        assert in_flight(fleet, 10.0 + 2 * SETTLE_S) == {"h": (1, 1)}

    def test_who_was_sent_to_a_worker_that_left_may_ask_again(self, fleet: Fleet) -> None:
        member = join(fleet, worker_info("h", Role.HYBRID))
        route(fleet, 10.0, name="again")
        fleet.leave(member)
        join(fleet, worker_info("h", Role.HYBRID, incarnation=2))
        route(fleet, 10.0, name="again")
        assert in_flight(fleet, 10.0) == {"h": (1, 1)}

    def test_equal_workers_share_a_burst(self, fleet: Fleet) -> None:
        for name in ("p1", "p2", "p3"):
            join(fleet, worker_info(name))
        join(fleet, worker_info("d", Role.DECODE))
        for _ in range(6):
            route(fleet, 10.0)
        assert {name: counts[0] for name, counts in in_flight(fleet, 10.0).items()} == {
            "p1": 2,
            "p2": 2,
            "p3": 2,
            "d": 0,
        }


def test_a_worker_is_ill_until_it_is_judged_well_or_comes_anew(fleet: Fleet) -> None:
    hangs = Verdict(Health.DEAD, HealthReason.HANGS, HealthReason.HANGS)
    names = [WorkerId(f"d{number}") for number in range(4)]
    members = [join(fleet, worker_info(name, Role.DECODE)) for name in names]
    fleet.judge(dict.fromkeys(names, hangs))
    assert fleet.hanging() == {each.worker_id for each in fleet.ill()} == set(names)
    fleet.judge({names[0]: Verdict()})
    join(fleet, replace(worker_info(names[1], Role.DECODE), incarnation=2))
    fleet.leave(members[2])
    assert fleet.hanging() == {each.worker_id for each in fleet.ill()} == {names[3]}


def test_a_patient_fleet_hears_of_workers_later(fleet: Fleet) -> None:
    members = [join(fleet, worker_info(f"w{number}")) for number in range(2)]
    for member in members:
        assert fleet.report(member, WorkerLoad(), 0.0)
    fleet.trust(4.0)
    assert fleet.confirm(members[0], 1.0)
    late = SILENT_AFTER_S + 4.0
    assert fleet.silent(late) == {}
    assert fleet.silent(late + 0.5).keys() == {"w1"}
    heard = {each.worker_id: each.reported_at for each in fleet.view(late).workers}
    assert heard == {"w0": 5.0, "w1": 4.0}
    assert fleet.expire(LEASE_S + 3.9) == []
    assert fleet.expire(LEASE_S + 4.0) == ["w1"]
