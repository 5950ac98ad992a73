from __future__ import annotations

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.core.types import (
    Candidate,
    Endpoint,
    Placement,
    RequestId,
    Role,
    RoutePlan,
    WorkerId,
)
from kvmesh.sim.events import EventQueue
from kvmesh.sim.fleet import LOST_AFTER_S, SimFleet, WorkerGroup, parse_fleet
from kvmesh.sim.requests import SimSequence
from kvmesh.sim.worker import SimWorker
from kvmesh.sim.worker_rules import WorkerRules
from tests.unit.sim.examples import profile, request

P, D = WorkerId("home-prefill-0"), WorkerId("home-decode-1")


class Listener:
    """Passes changes on to the fleet, as the simulation does."""

    fleet: SimFleet

    def on_chunk(self, worker: SimWorker, sequence: SimSequence) -> None:
        raise AssertionError

    def on_first_token(self, worker: SimWorker, sequence: SimSequence) -> None:
        raise AssertionError

    def on_finished(self, worker: SimWorker, sequence: SimSequence) -> None:
        raise AssertionError

    def on_opening(self) -> None:
        self.fleet.openings += 1

    def on_change(self, worker: SimWorker) -> None:
        self.fleet.note_change(worker)


def start(report_interval_s: float = 0.0) -> tuple[SimFleet, EventQueue]:
    events, listener = EventQueue(), Listener()
    fleet = SimFleet(
        events,
        profile(),
        listener,
        WorkerRules(),
        report_interval_s=report_interval_s,
    )
    listener.fleet = fleet
    fleet.build(parse_fleet("home:d:prefill:1,home:d:decode:1"))
    return fleet, events


def used(fleet: SimFleet) -> dict[str, int]:
    return {view.worker_id: view.decode_used for view in fleet.view().workers}


def plan() -> RoutePlan:
    at = Endpoint("x", 1)
    return RoutePlan(
        Placement.DISAGGREGATED, (Candidate(P, 1, at),), (Candidate(D, 1, at),), True, "", ""
    )


class TestParse:
    def test_groups(self) -> None:
        assert parse_fleet("remote:h:prefill:4,home:x:hybrid:0") == (
            WorkerGroup("remote", "h", Role.PREFILL, 4),
            WorkerGroup("home", "x", Role.HYBRID, 0),
        )

    @pytest.mark.parametrize("text", ["", "a:b:c", "a:b:prefill:x", "a:b:cook:1", "a:b:prefill:-1"])
    def test_what_is_none(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"COUNT|negative"):
            parse_fleet(text)

    def test_an_unknown_device(self) -> None:
        fleet, _ = start()
        with pytest.raises(ConfigError, match="'z'"):
            fleet.build(parse_fleet("home:z:prefill:1"))


class TestView:
    def test_live_loads_are_seen_at_once(self) -> None:
        fleet, _ = start()
        assert used(fleet) == {P: 0, D: 0}
        fleet.workers[D].reserve(request())
        assert used(fleet) == {P: 0, D: 1}

    def test_reports_are_as_old_as_their_interval(self) -> None:
        fleet, events = start(report_interval_s=1.0)
        assert used(fleet)[D] == 0
        fleet.workers[D].reserve(request())
        assert used(fleet)[D] == 0
        events.at(1.0, lambda: None)
        events.run(lambda: False)
        assert used(fleet)[D] == 1

    def test_routes_count_until_the_next_report(self) -> None:
        fleet, events = start(report_interval_s=1.0)
        fleet.view()
        fleet.note_route(RequestId("r"), plan())
        assert used(fleet)[D] == 1
        events.at(1.0, lambda: None)
        events.run(lambda: False)
        assert used(fleet)[D] == 0

    def test_who_asks_again_counts_once(self) -> None:
        fleet, events = start(report_interval_s=1.0)
        fleet.view()
        for _ in range(2):
            fleet.withdraw(RequestId("r"))
            fleet.note_route(RequestId("r"), plan())
            assert used(fleet) == {P: 0, D: 1}
        fleet.note_route(RequestId("s"), plan())
        assert used(fleet)[D] == 2
        fleet.withdraw(RequestId("r"))
        fleet.withdraw(RequestId("r"))
        assert used(fleet)[D] == 1
        events.at(1.0, lambda: None)
        events.run(lambda: False)
        assert used(fleet)[D] == 0
        fleet.withdraw(RequestId("s"))  # a report overtook it
        assert used(fleet)[D] == 0

    def test_a_plan_for_an_earlier_life_is_not_taken_from_the_next_one(self) -> None:
        fleet, _ = start(report_interval_s=1.0)
        fleet.view()
        fleet.note_route(RequestId("r"), plan())
        fleet.workers[D].fail()
        fleet.restart(D)
        fleet.withdraw(RequestId("r"))
        assert used(fleet) == {P: 0, D: 0}

    def test_routes_turn_a_rotation(self) -> None:
        fleet, _ = start()
        fleet.note_route(RequestId("r"), plan())
        assert fleet.view().num_routes == 1

    def test_the_dead_leave_with_their_lease_and_come_back_empty(self) -> None:
        fleet, events = start()
        dead = fleet.workers[D]
        dead.reserve(request())
        dead.fail()
        fleet.forget(dead)
        assert len(fleet.view().workers) == 2
        events.at(LOST_AFTER_S, lambda: None)
        events.run(lambda: False)
        assert [view.worker_id for view in fleet.view().workers] == [P]
        fleet.restart(D)
        assert used(fleet) == {P: 0, D: 0}
        assert fleet.workers[D].info.incarnation == 2
        fleet.restart(D)
        assert fleet.workers[D].info.incarnation == 2, "it is up already"

    def test_a_quick_restart_is_not_expired(self) -> None:
        fleet, events = start()
        dead = fleet.workers[D]
        dead.fail()
        fleet.forget(dead)
        fleet.restart(D)
        events.run(lambda: False)
        assert len(fleet.view().workers) == 2
