"""Prompts that simulated workers compute together: how long they take, and what a death leaves."""

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

DEVICE = Device("d", Quadratic(0.0, 1e-3, 1e-7), DecodeCost(0.01, 0.0, 0.0), 400, 1, 4)
NUM_BLOCKS = 32
LENGTH = NUM_BLOCKS * TRACE_BLOCK
ALONE_S = DEVICE.prefill_s(LENGTH)


def profile() -> Profile:
    known = load_profile("flowkv")
    return dataclasses.replace(
        known,
        devices={"d": DEVICE},
        kv_bytes=Quadratic(0.0, 1000.0),
        links=Links(1e8, 1e8, 0.0),
        plan=dataclasses.replace(known.plan, remote="d", local="d"),
    )


def run(
    num_prefill: int, *requests: TraceRequest, failures: tuple[Failure, ...] = ()
) -> Simulation:
    fixed = dataclasses.replace(SYSTEMS["kvmesh"], switch_roles=False, reallocate=False)
    scenario = Scenario(
        profile(),
        parse_fleet(f"home:d:prefill:{num_prefill},home:d:decode:1"),
        fixed,
        requests,
        failures=failures,
        objectives=Objectives((TimeoutTier(1 << 62, 1e6),)),
        jitter=0.0,
        chains=True,
    )
    simulation = Simulation(scenario)
    simulation.run()
    for worker in simulation.fleet.workers.values():
        worker.pool.check_integrity()
        if worker.alive:
            assert worker.load().prefill_active == 0
    return simulation


def request(at_s: float, first: int = 0, num_blocks: int = NUM_BLOCKS) -> TraceRequest:
    ids = tuple(range(first, first + num_blocks))
    return TraceRequest(at_s, num_blocks * TRACE_BLOCK, 2, ids)


def test_attention_is_the_share_of_the_curve() -> None:
    assert DEVICE.pair_share == pytest.approx(2e-4)


@pytest.mark.parametrize(("num_prefill", "sooner"), [(2, 1.8), (4, 3.2)])
def test_idle_workers_are_sooner_by_about_their_number(num_prefill: int, sooner: float) -> None:
    alone = run(1, request(0.0)).result.requests[0]
    assert alone.ttft_s == pytest.approx(ALONE_S, rel=0.01)
    chained = run(num_prefill, request(0.0))
    (found,) = chained.result.requests
    assert found.outcome is Outcome.DONE
    assert found.ttft_s is not None
    assert sooner < ALONE_S / found.ttft_s < num_prefill
    computed = sum(worker.steps.computed_tokens for worker in chained.fleet.workers.values())
    assert computed == LENGTH, "each token once"
    assert 0 < chained.chains.tokens < LENGTH


def test_a_cached_prefix_is_computed_by_nobody() -> None:
    """Only one worker has it; the other one fetches it and computes what comes next."""
    prefix = TraceRequest(0.0, 16 * TRACE_BLOCK + 1, 2, (*range(16), 5000))
    longer = TraceRequest(100.0, LENGTH, 2, tuple(range(NUM_BLOCKS)))
    alone = run(1, prefix, longer).result.requests[1]
    chained = run(2, prefix, longer)
    found = chained.result.requests[1]
    assert found.ttft_s is not None
    assert alone.ttft_s is not None
    assert 1.5 < alone.ttft_s / found.ttft_s < 2.0
    computed = sum(worker.steps.computed_tokens for worker in chained.fleet.workers.values())
    assert computed == LENGTH + 1, "each token once"


def test_a_short_prompt_is_left_to_one_worker() -> None:
    chained = run(2, request(0.0, num_blocks=3))
    assert chained.chains.tokens == 0


def test_a_busy_worker_computes_no_part() -> None:
    chained = run(2, request(0.0), request(0.5, first=1000))
    assert {each.outcome for each in chained.result.requests} == {Outcome.DONE}
    assert chained.chains.tokens < LENGTH, "the second prompt came while both were at work"


def test_the_death_of_a_worker_costs_time() -> None:
    failure = Failure(1.0, FailureKind.KILL, 0)
    chained = run(2, request(0.0), failures=(failure,))
    (found,) = chained.result.requests
    assert found.outcome is Outcome.DONE
