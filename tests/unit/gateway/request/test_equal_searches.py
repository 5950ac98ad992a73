"""Overloaded runs with the simulator's search for workers, and again with the live gateway's.

The same requests are served, refused and given up, at the same times and in the same order.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvmesh.core.types import RefusalReason, RequestId
from kvmesh.policy.curves import Quadratic
from kvmesh.policy.pdserve import TimeoutTier
from kvmesh.policy.waiting import Looking
from kvmesh.sim import control, simulation
from kvmesh.sim.placing import Placed, waiting_by_scenario
from kvmesh.sim.requests import Outcome, SimRequest
from kvmesh.sim.scenario import Objectives, Scenario, parse_failures
from kvmesh.sim.systems import SYSTEMS, System
from tests.unit.gateway.request.simulated_gateway import SimulatedGateway
from tests.unit.sim.examples import scenario, trace

FLEET = "home:d:prefill:2,home:d:decode:2"
TWO_CLUSTERS = "remote:d:prefill:2,home:d:prefill:1,home:d:decode:2"
GROUPS = "chat:d:prefill:1,chat:d:decode:1,code:d:prefill:1,code:d:decode:1"


@dataclasses.dataclass(frozen=True)
class Decision:
    """The end of a search."""

    at_s: float
    request_id: RequestId
    workers: tuple[str, ...] = ()
    refusal: RefusalReason | None = None


class Noted(simulation.Simulation):
    """A run that notes the ends of searches, and what its loops read of waiting requests."""

    def __init__(self, what: Scenario) -> None:
        self.decisions: list[Decision] = []
        super().__init__(what)

    def _placed(self, placed: Placed) -> None:
        workers = (placed.prefill_worker.info.worker_id, placed.decode_worker.info.worker_id)
        self.decisions.append(Decision(self.events.now(), placed.request.request_id, workers))
        super()._placed(placed)

    def _refused(
        self, request: SimRequest, reason: RefusalReason, retry_after_s: float = 0.0
    ) -> None:
        self.decisions.append(Decision(self.events.now(), request.request_id, refusal=reason))
        super()._refused(request, reason, retry_after_s)


Told = list[dict[str, Looking]]


def noted(told: Told, count: Callable[[Any], dict[str, Looking]]) -> Callable[[Any], Any]:
    """The same counts of waiting requests, and a note of each."""

    def counted(searching: Any) -> dict[str, Looking]:
        told.append(count(searching))
        return told[-1]

    return counted


def compare(what: Scenario, monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Runs it both ways; returns the run with the simulator's search."""
    modelled_told, live_told = Told(), Told()
    monkeypatch.setattr(control, "waiting_by_scenario", noted(modelled_told, waiting_by_scenario))
    modelled = Noted(what)
    modelled.run()
    gateway = SimulatedGateway()
    monkeypatch.setattr(simulation, "Lanes", lambda _labels: gateway)
    monkeypatch.setattr(simulation, "Placing", gateway.placing)
    monkeypatch.setattr(control, "waiting_by_scenario", noted(live_told, gateway.told))
    live = Noted(what)
    gateway.open(live)
    live.run()
    assert gateway.queries, "the live search asked for plans"
    assert live.decisions == modelled.decisions
    assert live.result.reasons == modelled.result.reasons
    assert live_told == modelled_told
    for ours, theirs in zip(live.result.requests, modelled.result.requests, strict=True):
        for each in ("outcome", "first_token_s", "finished_s"):
            assert getattr(ours, each) == getattr(theirs, each), ours.request_id
    return modelled


def overload(
    count: int,
    gap_s: float,
    system: str | System,
    *,
    ttft_s: float = 3.0,
    scenarios: tuple[str, ...] = ("",),
    **changes: Any,
) -> Scenario:
    """Prompts and answers of many lengths, half of them with a prefix that others have."""
    draw = random.Random(1)
    at, requests = 0.0, []
    for n in range(count):
        at += draw.expovariate(1 / gap_s)
        first_id = 1000 * draw.randrange(20) if draw.random() < 0.5 else 10**6 + 1000 * n
        blocks, output = draw.randrange(1, 5), draw.randrange(2, 120)
        name = draw.choice(scenarios)
        requests.append(trace(at, blocks, output, first_id=first_id, scenario=name))
    changes.setdefault("fleet", FLEET)
    changes.setdefault("objectives", Objectives((TimeoutTier(1 << 62, ttft_s),)))
    made = scenario(*requests, **changes)
    found = SYSTEMS[system] if isinstance(system, str) else system
    return dataclasses.replace(made, system=found)


def refused_at_arrival(run: Noted) -> int:
    """Requests that the gateway refused without a search: too many waited before them."""
    return sum(
        each.outcome is Outcome.REFUSED and each.finished_s == each.arrival_s
        for each in run.result.requests
    )


def refusals(run: Noted) -> Counter[RefusalReason]:
    """Number of refused requests by reason."""
    return Counter(each.refusal for each in run.decisions if each.refusal is not None)


def waited(run: Noted) -> int:
    """Requests that workers took only after they had waited."""
    return sum(
        each.placed_s is not None and each.placed_s > each.arrival_s for each in run.result.requests
    )


@pytest.mark.parametrize("system", ["kvmesh", "forwarding", "pdserve"])
def test_requests_that_wait_and_are_given_up(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts wait for prefill slots."""
    run = compare(overload(80, 0.25, system), monkeypatch)
    assert waited(run) > 10
    assert refusals(run)


def test_requests_that_wait_for_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    run = compare(overload(50, 0.4, "forwarding", device={"decode_slots": 1}), monkeypatch)
    assert waited(run) > 10
    assert refusals(run)[RefusalReason.NO_SLOTS]


def test_a_crowd_is_refused_at_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    device = {"prefill_s": Quadratic(0.0, 0.0001), "decode_slots": 16}
    run = compare(overload(180, 0.015, "forwarding", ttft_s=2.0, device=device), monkeypatch)
    assert refused_at_arrival(run) > 10
    assert waited(run) > 10
    assert refusals(run)[RefusalReason.DEADLINE], "some had no turn in time"


def test_each_group_has_its_own_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    system = dataclasses.replace(SYSTEMS["flowkv"], grouped=True)
    what = overload(50, 0.25, system, fleet=GROUPS, scenarios=("chat", "code", "code", "mail"))
    run = compare(what, monkeypatch)
    assert waited(run) > 10
    assert refusals(run)


@pytest.mark.parametrize("system", ["forwarding", "prfaas", "kvmesh"])
def test_each_cluster_has_its_own_line(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = compare(overload(80, 0.15, system, fleet=TWO_CLUSTERS), monkeypatch)
    assert {each.remote for each in run.result.requests} == {True, False}
    assert waited(run) > 10
    assert refusals(run)


def test_requests_of_a_dead_worker_search_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = parse_failures("3:kill:0,5:kill:3,7:restart:0,8:restart:3")
    run = compare(overload(40, 0.3, "forwarding", failures=failures), monkeypatch)
    assert any(each.attempt for each in run.result.requests)
    assert waited(run) > 10
