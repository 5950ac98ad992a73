"""One overloaded run, followed by the scheduler's planner: equal changes of roles.

In each cycle the planner is told what live workers and gateways in that state report. What only
engines can measure is the same for both: speeds are those of the profile.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from kvmesh.core.pace import PaceRoom, StepPace
from kvmesh.core.types import RequestId, Role, RoutePlan, RouteQuery, WorkerId, WorkerInfo
from kvmesh.core.values import changed
from kvmesh.policy.pdserve import RatioReason, TimeoutTier
from kvmesh.policy.role_switch import SwitchReason
from kvmesh.sim import control, simulation
from kvmesh.sim.fleet import MODEL
from kvmesh.sim.requests import SimRequest
from kvmesh.sim.scenario import Objectives, Scenario
from kvmesh.sim.systems import SYSTEMS, Offload
from services.scheduler.fleet import Membership
from tests.unit.scheduler.parts import Parts
from tests.unit.sim.examples import scenario, trace

PATIENT = Objectives((TimeoutTier(1 << 62, 1e6),))


class Followed(control.Control):
    """The simulator's loops, each step of which the service's planner takes as well.

    Attributes:
        mesh: the scheduler's parts.
        knows_pace: whether workers report the speed of their decode steps; then both sides know
            what eq. 1 reads.
        most_waiting: largest number of requests that waited in a cycle.
        turned: role changes so far, as the simulator made them.
    """

    mesh: Parts
    infos: dict[WorkerId, WorkerInfo]
    members: dict[WorkerId, Membership]
    knows_pace = False
    most_waiting = 0
    turned: list[tuple[str, str]]

    def follow(self) -> None:
        """Starts the scheduler beside it."""
        self.mesh = Parts(policy=self._scenario.system.name)
        self.mesh.planner.profile = dataclasses.replace(self._scenario.profile, name=MODEL)
        self.infos, self.members, self.turned = {}, {}, []
        self._waited: set[str] = set()

    def note_prompt(self, request: SimRequest, plan: RoutePlan) -> None:
        self._tell_time()
        self.mesh.planner.note_route("gateway", _query(request), plan)
        super().note_prompt(request, plan)

    def cycle(self) -> None:
        self._step(partial(self.mesh.planner.cycle, may_order=True), super().cycle)

    def reallocate(self) -> None:
        self._step(partial(self.mesh.planner.reallocate, may_order=True), super().reallocate)

    def _step(
        self, live: Callable[[], Coroutine[Any, Any, None]], modelled: Callable[[], None]
    ) -> None:
        self._tell_time()
        before = {name: each.info.role for name, each in self._fleet.workers.items()}
        self._report()
        first = len(self.mesh.orders)
        asyncio.run(live())
        modelled()
        after = {name: each.info.role for name, each in self._fleet.workers.items()}
        turned = {name: role.value for name, role in after.items() if role is not before[name]}
        assert dict(self.mesh.orders[first:]) == turned
        self.turned += turned.items()

    def _tell_time(self) -> None:
        self.mesh.clock.advance(self._events.now() - self.mesh.clock.now())

    def _report(self) -> None:
        """Tells the scheduler what workers and gateways would."""
        now = self.mesh.clock.now()
        for name, worker in self._fleet.workers.items():
            if self.infos.get(name) is not worker.info:  # new, or with another role
                joined = self.mesh.fleet.register(worker.info, now)
                assert isinstance(joined, Membership)
                self.infos[name], self.members[name] = worker.info, joined
            load = changed(
                control.reported_load(worker),
                prefill_tokens_total=0,
                decode_tokens_total=worker.steps.generated_tokens,
            )
            if self.knows_pace:
                cost = worker.device.decode
                assert cost.per_sequence == 0.0, "a worker fits steps to their context alone"
                load = changed(load, room=PaceRoom(StepPace(cost.constant, cost.per_token)))
            assert self.mesh.fleet.report(self.members[name], load, now)
        looking = self._desk.searching
        waiting = Counter(each.trace.scenario for each in looking)
        reserved = Counter(
            request.trace.scenario for request, each in looking.items() if each.has_reservation
        )
        for scene in waiting.keys() | self._waited:
            self._told_waiting(scene, waiting[scene], reserved[scene])
        self._waited = set(waiting)
        self.most_waiting = max(self.most_waiting, len(looking))

    def _told_waiting(self, name: str, count: int, reserved: int) -> None:
        """Tells it by a request that asked before."""
        asks = RouteQuery(
            RequestId("waits"),
            MODEL,
            1,
            1,
            (),
            scenario=name,
            avoid=frozenset({WorkerId("refused")}),
            waiting=count,
            waiting_reserved=reserved,
        )
        self.mesh.planner.demand.note_query("gateway", asks, self.mesh.clock.now())


def _query(request: SimRequest) -> RouteQuery:
    return RouteQuery(
        request.request_id,
        MODEL,
        request.num_tokens,
        request.remaining_tokens,
        request.hashes,
        scenario=request.trace.scenario,
    )


def followed(
    what: Scenario, monkeypatch: pytest.MonkeyPatch, *, knows_pace: bool = False
) -> tuple[Followed, Counter[str]]:
    """Runs it to its end; every step is compared."""
    monkeypatch.setattr(simulation, "Control", Followed)
    if not knows_pace:  # as before live workers have measured it
        monkeypatch.setattr(control, "_profile_of", lambda _worker, _lengths: None)
    run = simulation.Simulation(what)
    assert isinstance(run.control, Followed)
    run.control.knows_pace = knows_pace
    run.control.follow()
    result = run.run()
    return run.control, result.reasons


def shifting(system: str, fleet: str) -> Scenario:
    """Long prompts with short answers, then the opposite; more than the fleet can serve."""
    first = [trace(0.3 * n, 6, 2, first_id=100 * n) for n in range(200)]
    then = [trace(200 + 0.5 * n, 1, 1500, first_id=10**5 + 100 * n) for n in range(120)]
    return scenario(*first, *then, fleet=fleet, system=system, objectives=PATIENT)


@pytest.mark.parametrize("system", ["flowkv", "kvmesh"])
def test_workers_help_the_side_where_requests_wait(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = shifting(system, "home:d:prefill:4,home:d:decode:4")
    loops, reasons = followed(what, monkeypatch)
    assert loops.most_waiting >= 4
    assert {role for _, role in loops.turned} == {Role.PREFILL.value, Role.DECODE.value}
    logged = Counter(
        SwitchReason[str(each["reason"]).upper()].value
        for each in loops.mesh.decisions.as_json()["fleet"]
        if each["kind"] == "switch"
    )
    assert {f"switch: {reason}": count for reason, count in logged.items()} == {
        reason: count for reason, count in reasons.items() if reason.startswith("switch")
    }


@pytest.mark.parametrize("knows_pace", [False, True])
def test_the_monitor_moves_the_same_workers(
    knows_pace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the times alone, and by eq. 1 on measured speeds and answers."""
    first = [trace(0.8 * n, 4, 20, first_id=100 * n) for n in range(300)]
    then = [trace(240 + 0.4 * n, 1, 1000, first_id=10**5 + 100 * n) for n in range(300)]
    fleet = "home:d:prefill:2,home:d:decode:4"
    what = scenario(*first, *then, fleet=fleet, system="pdserve", objectives=PATIENT)
    loops, reasons = followed(what, monkeypatch, knows_pace=knows_pace)
    assert loops.most_waiting >= 4
    assert loops.turned
    assert (reasons[f"monitor: {RatioReason.BY_RATE.value}"] > 0) == knows_pace


def test_reallocation_moves_the_same_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    system = dataclasses.replace(SYSTEMS["prfaas"], offload=Offload.NONE)
    requests = [trace(0.2 * n, 1, 2, first_id=100 * n) for n in range(750)]
    made = scenario(*requests, fleet="home:d:prefill:2,home:d:decode:6", objectives=PATIENT)
    loops, _ = followed(dataclasses.replace(made, system=system), monkeypatch)
    assert loops.most_waiting >= 4
    assert loops.turned
