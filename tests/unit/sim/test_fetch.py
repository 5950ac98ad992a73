"""Prefixes between simulated workers: how long they take, and what is left when a holder dies."""

from __future__ import annotations

import dataclasses

import pytest

from kvmesh.policy.curves import Quadratic
from kvmesh.policy.pdserve import TimeoutTier
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.profile import DecodeCost, Device, Links, Profile
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.requests import Outcome
from kvmesh.sim.scenario import Failure, FailureKind, Objectives, Scenario
from kvmesh.sim.simulation import Simulation
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest

DEVICE = Device("d", Quadratic(0.0, 0.001), DecodeCost(0.01, 0.0, 0.0), 400, 1, 4)
"""A token takes a millisecond."""
TOKEN_BYTES = 1000.0
PREFIX = tuple(range(10))
OWN = 3 * TRACE_BLOCK + 10
LENGTH = len(PREFIX) * TRACE_BLOCK + OWN


def profile(inside_bytes_s: float = 1e8) -> Profile:
    """KV of a token travels in 10 microseconds, unless said otherwise."""
    known = load_profile("flowkv")
    return dataclasses.replace(
        known,
        devices={"d": DEVICE},
        kv_bytes=Quadratic(0.0, TOKEN_BYTES),
        links=Links(inside_bytes_s, inside_bytes_s, 0.0),
        plan=dataclasses.replace(known.plan, remote="d", local="d"),
    )


def request(at_s: float, tail: int) -> TraceRequest:
    """A common prefix, and three blocks and ten tokens of its own."""
    own = (tail, tail + 1, tail + 2)
    return TraceRequest(at_s, LENGTH, 2, (*PREFIX, *own, tail + 3))


def run(
    *requests: TraceRequest,
    system: str = "kvmesh",
    costs: Profile | None = None,
    failures: tuple[Failure, ...] = (),
) -> Simulation:
    fixed = dataclasses.replace(SYSTEMS[system], switch_roles=False, reallocate=False)
    scenario = Scenario(
        costs or profile(),
        parse_fleet("home:d:prefill:2,home:d:decode:1"),
        fixed,
        requests,
        failures=failures,
        objectives=Objectives((TimeoutTier(1 << 62, 1e6),)),
        jitter=0.0,
    )
    simulation = Simulation(scenario)
    simulation.run()
    for worker in simulation.fleet.living():
        assert worker.pool.is_idle
    return simulation


ALIKE = (request(0.0, 100), request(20.0, 200), request(20.1, 300))
"""The second goes to the prefill worker that holds the prefix, the third finds it busy."""


def test_who_comes_while_the_holder_works_fetches_and_is_sooner() -> None:
    simulation = run(*ALIKE)
    first, second, third = simulation.result.requests
    assert first.ttft_s == pytest.approx(LENGTH * 0.001)
    assert second.prefill_on == first.prefill_on != third.prefill_on
    # Ten blocks of a thousand bytes per token, and what is the request's own.
    assert third.ttft_s == pytest.approx(5120 * 1e-5 + OWN * 0.001)
    assert third.cached_tokens == simulation.fetches.tokens == 5120
    computed = run(*ALIKE, system="cache_load").result.requests[2]
    assert computed.ttft_s is not None
    assert third.ttft_s is not None
    assert third.ttft_s < 0.8 * computed.ttft_s


def test_on_a_slow_way_nothing_is_fetched() -> None:
    simulation = run(*ALIKE, costs=profile(inside_bytes_s=1e6))
    assert simulation.fetches.tokens == 0


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_worker_that_dies_meanwhile_costs_time_alone(index: int) -> None:
    dies = Failure(20.11, FailureKind.KILL, index)
    simulation = run(*ALIKE, failures=(dies, Failure(21.0, FailureKind.RESTART, index)))
    assert all(each.outcome is Outcome.DONE for each in simulation.result.requests)


def test_of_a_dead_holder_nothing_counts() -> None:
    fetching = run(*ALIKE[:2], request(20.0, 300))
    assert fetching.fetches.tokens == 5120
    everybody = tuple(Failure(20.01, FailureKind.KILL, index) for index in (0, 1, 2))
    back = tuple(Failure(21.0, FailureKind.RESTART, index) for index in (0, 1, 2))
    simulation = run(*ALIKE[:2], request(20.0, 300), failures=(*everybody, *back))
    assert simulation.fetches.tokens == 0
    assert all(each.outcome is Outcome.DONE for each in simulation.result.requests)
