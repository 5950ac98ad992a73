"""Requests of one moment are placed together in the simulator, too."""

from __future__ import annotations

import dataclasses

import pytest

from kvmesh.sim.requests import Outcome
from kvmesh.sim.simulation import Result, Simulation
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest
from tests.unit.sim.test_fetch import LENGTH, PREFIX, run

OTHER = tuple(range(900, 910))


def replay(system: str) -> Simulation:
    """Two prefixes come to lie on two workers; then two prompts come at once that go on from them,
    in the other order than the names of the workers.
    """
    warm = [prompt(0.0, PREFIX, 100), prompt(0.0, OTHER, 200)]
    both = [prompt(500.0, OTHER, 300), prompt(500.0, PREFIX, 400)]
    return run(*warm, *both, system=system)


def prompt(at_s: float, prefix: tuple[int, ...], tail: int) -> TraceRequest:
    own = (tail, tail + 1, tail + 2)
    return TraceRequest(at_s, LENGTH, 2, (*prefix, *own, tail + 3))


@pytest.mark.parametrize("system", ["joint", "tokenlake"])
def test_prompts_go_where_their_prefixes_are(system: str) -> None:
    simulation = replay(system)
    result: Result = simulation.result
    assert all(each.outcome is Outcome.DONE for each in result.requests)
    first, second, third, fourth = result.requests
    assert {first.prefill_on, second.prefill_on} == {"home-prefill-0", "home-prefill-1"}
    assert third.prefill_on == second.prefill_on
    assert fourth.prefill_on == first.prefill_on
    assert simulation.fetches.tokens == 0
    assert third.cached_tokens == fourth.cached_tokens == len(PREFIX) * TRACE_BLOCK
    assert result.reasons["joint: kept"] + result.reasons["joint: moved"] == 4


def test_a_window_gathers_those_that_would_wait_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both workers are at work when two more prompts come, a tenth of a second apart."""

    def alone(window_s: float) -> int:
        system = SYSTEMS["joint"]
        # Nor does a decode worker take one of them at once.
        route = dataclasses.replace(system.route, aggregate_tokens=0)
        system = dataclasses.replace(system, joint_window_s=window_s, route=route)
        monkeypatch.setitem(SYSTEMS, "joint", system)
        at_work = [prompt(500.0, OTHER, 300), prompt(500.0, PREFIX, 400)]
        later = [prompt(500.5, OTHER, 500), prompt(500.6, PREFIX, 600)]
        simulation = run(*at_work, *later, system="joint")
        assert all(each.outcome is Outcome.DONE for each in simulation.result.requests)
        return simulation.result.reasons["joint: alone"]

    assert alone(0.2) < alone(0.0)
