"""Overloaded runs, followed by the scheduler's planner: equal changes of roles.

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

from kvmesh.core.pace import PaceRoom
from kvmesh.core.types import RequestId, Role, RoutePlan, RouteQuery, WorkerId, WorkerInfo
from kvmesh.core.values import changed
from kvmesh.policy.groups import GroupKey
from kvmesh.policy.pdserve import RatioReason, TimeoutTier
from kvmesh.policy.ratio_monitor import RatioMonitor
from kvmesh.policy.reallocation import ReallocationReason
from kvmesh.policy.role_switch import SwitchReason
from kvmesh.policy.waiting import Looking
from kvmesh.sim import control, simulation
from kvmesh.sim.fleet import MODEL
from kvmesh.sim.placing import waiting_by_scenario
from kvmesh.sim.requests import SimRequest
from kvmesh.sim.scenario import Objectives, Scenario
from kvmesh.sim.systems import SYSTEMS, Offload, System
from services.scheduler.fleet import Membership
from tests.unit.scheduler.parts import Parts
from tests.unit.sim.examples import scenario, trace

LIMITS = Objectives((TimeoutTier(1 << 62, 8.0),))


class Followed(control.Control):
    """The simulator's loops, each step of which the service's planner takes as well.

    Attributes:
        mesh: the scheduler's parts.
        most_waiting: largest number of requests that waited in a cycle.
        turned: role changes so far, as the simulator made them.
    """

    mesh: Parts
    infos: dict[WorkerId, WorkerInfo]
    members: dict[WorkerId, Membership]
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
        if self._scenario.system.monitor:
            read = self.mesh.planner._loops(MODEL)._groups._monitors
            assert _sums(self._ratios._monitors) == _sums(read), "the monitors read the same"
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
            assert self.mesh.fleet.report(self.members[name], load, now)
        # `test_equal_searches.py` compares these numbers with those of live gateways.
        waiting = waiting_by_scenario(self._desk.searching)
        for scene in waiting.keys() | self._waited:
            told = waiting.get(scene, Looking())
            self._told_waiting(scene, told)
        self._waited = set(waiting)
        self.most_waiting = max(self.most_waiting, len(self._desk.searching))

    def _told_waiting(self, name: str, told: Looking) -> None:
        """Tells it by a request that asked before."""
        asks = RouteQuery(
            RequestId("waits"),
            MODEL,
            1,
            1,
            (),
            scenario=name,
            avoid=frozenset({WorkerId("refused")}),
            waiting=told.reserved + told.unreserved,
            waiting_reserved=told.reserved,
            waiting_remote=told.remote,
        )
        self.mesh.planner.demand.note_query("gateway", asks, self.mesh.clock.now())


def _sums(monitors: dict[GroupKey, RatioMonitor]) -> dict[GroupKey, object]:
    return {key: each._sums for key, each in monitors.items()}


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
    """Runs it to its end; every step is compared.

    Args:
        knows_pace: whether workers report the speed of their decode steps, which eq. 1 reads.
    """
    monkeypatch.setattr(simulation, "Control", Followed)
    if not knows_pace:
        measured = control.reported_load
        monkeypatch.setattr(
            control, "reported_load", lambda worker: changed(measured(worker), room=PaceRoom())
        )
    run = simulation.Simulation(what)
    assert isinstance(run.control, Followed)
    run.control.follow()
    result = run.run()
    return run.control, result.reasons


def shifting(system: str, fleet: str) -> Scenario:
    """Long prompts with short answers, then the opposite; more than the fleet can serve."""
    first = [trace(0.3 * n, 6, 2, first_id=100 * n) for n in range(100)]
    then = [trace(60 + 0.3 * n, 1, 1000, first_id=10**5 + 100 * n) for n in range(120)]
    return scenario(*first, *then, fleet=fleet, system=system, objectives=LIMITS)


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
    first = [trace(0.6 * n, 4, 20, first_id=100 * n) for n in range(100)]
    then = [trace(60 + 0.3 * n, 1, 1000, first_id=10**5 + 100 * n) for n in range(150)]
    fleet = "home:d:prefill:2,home:d:decode:4"
    what = scenario(*first, *then, fleet=fleet, system="pdserve", objectives=LIMITS)
    loops, reasons = followed(what, monkeypatch, knows_pace=knows_pace)
    assert loops.most_waiting >= 4
    assert loops.turned
    assert (reasons[f"monitor: {RatioReason.BY_RATE.value}"] > 0) == knows_pace


def test_reallocation_moves_the_same_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    system = dataclasses.replace(SYSTEMS["prfaas"], offload=Offload.NONE)
    requests = [trace(0.2 * n, 1, 2, first_id=100 * n) for n in range(750)]
    made = scenario(*requests, fleet="home:d:prefill:2,home:d:decode:6", objectives=LIMITS)
    loops, _ = followed(dataclasses.replace(made, system=system), monkeypatch)
    assert loops.most_waiting >= 4
    assert loops.turned


TWO_GROUPS = "chat:d:prefill:2,chat:d:decode:3,code:d:prefill:2,code:d:decode:3"
"""Each cluster is a group, and of its scenario where the system has groups of scenarios."""


def mixed(fleet: str, system: System, *scenarios: str) -> Scenario:
    """Long prompts and then long answers of each scenario; more than the fleet can serve."""
    first = [trace(0.2 * n, 4, 2, first_id=100 * n) for n in range(100)]
    then = [trace(25 + 0.2 * n, 1, 600, first_id=10**5 + 100 * n) for n in range(80)]
    requests = [
        dataclasses.replace(each, scenario=scenarios[n % len(scenarios)])
        for n, each in enumerate([*first, *then])
    ]
    return dataclasses.replace(scenario(*requests, fleet=fleet, objectives=LIMITS), system=system)


@pytest.mark.parametrize(("system", "grouped"), [("flowkv", False), ("pdserve", True)])
def test_groups_keep_their_workers(
    system: str, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By cluster alone, and by scenario, one of which has no group."""
    made = dataclasses.replace(SYSTEMS[system], grouped=grouped)
    what = mixed(TWO_GROUPS, made, "chat", "code", "mail", "code")
    loops, _ = followed(what, monkeypatch, knows_pace=True)
    assert loops.most_waiting >= 4
    assert {name.split("-")[0] for name, _ in loops.turned} == {"chat", "code"}


def test_reallocation_moves_nobody_if_there_are_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    system = dataclasses.replace(SYSTEMS["prfaas"], offload=Offload.NONE)
    requests = [trace(0.24 * n, 1, 2, first_id=100 * n) for n in range(560)]
    fleet = "east:d:prefill:1,east:d:decode:3,west:d:prefill:1,west:d:decode:3"
    made = scenario(*requests, fleet=fleet, objectives=LIMITS)
    loops, reasons = followed(dataclasses.replace(made, system=system), monkeypatch)
    assert reasons[f"reallocation: {ReallocationReason.PREFILL_BOTTLENECK.value}"]
    assert not loops.turned
