"""Simulated workers with tiers: what comes up, when, and what routes are told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvmesh.core.types import WorkerId
from kvmesh.policy.holders import Lower, lower_of
from kvmesh.sim.requests import block_hash
from kvmesh.sim.scenario import Scenario
from kvmesh.sim.simulation import Simulation
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.tiers import TierSizes
from kvmesh.sim.workload import Workload, make_requests
from tests.unit.sim.examples import profile, scenario, trace

ALONE = "home:d:hybrid:1"
FAST = TierSizes(host_blocks=40, host_bytes_per_s=1e9)
"""A block comes up in 0.512 ms; it is computed in 512 ms."""


def run(tiers: TierSizes, *firsts: int, fleet: str = ALONE, **changes: Any) -> Simulation:
    """Prompts of four blocks each, one every ten seconds, in pools of six."""
    prompts = [trace(at=10.0 * at, blocks=4, first_id=each) for at, each in enumerate(firsts)]
    fixed = dataclasses.replace(SYSTEMS["kvmesh"], switch_roles=False, reallocate=False)
    plan = scenario(*prompts, fleet=fleet, device={"num_blocks": 6}, tiers=tiers, **changes)
    simulation = Simulation(dataclasses.replace(plan, system=fixed))
    simulation.run()
    for worker in simulation.fleet.workers.values():
        worker.pool.check_integrity()
        assert worker.pool.is_idle
    return simulation


def first_tokens(simulation: Simulation) -> list[float]:
    return [
        round(each.first_token_s - each.trace.arrival_s, 4)
        for each in simulation.result.requests
        if each.first_token_s is not None
    ]


def cached_tokens(simulation: Simulation) -> int:
    return sum(worker.cached_tokens for worker in simulation.fleet.workers.values())


@pytest.mark.parametrize(
    ("tiers", "cached", "last_s"),
    [
        (TierSizes(), 0, 2.049),
        (FAST, 2048, 0.0131),
        (TierSizes(disk_blocks=40, disk_bytes_per_s=1e8), 2048, 0.0315),
        (TierSizes(disk_blocks=40, disk_bytes_per_s=1e5), 0, 2.049),
        (TierSizes(host_blocks=4, disk_blocks=40, disk_bytes_per_s=1e8), 2048, 0.0315),
    ],
    ids=["none", "host", "disk", "a disk slower than computing", "from host memory to disk"],
)
def test_an_evicted_prompt_comes_up_where_that_is_sooner(
    tiers: TierSizes, cached: int, last_s: float
) -> None:
    simulation = run(tiers, 0, 100, 200, 300, 0)
    assert cached_tokens(simulation) == cached
    assert first_tokens(simulation)[-1] == pytest.approx(last_s, abs=0.003)


def test_routes_are_told_what_is_where() -> None:
    simulation = run(FAST, 0, 100, 200)
    (worker,) = simulation.fleet.workers
    found = simulation.fleet.index.match([block_hash(number) for number in range(4)])
    assert found[worker] == 4
    assert lower_of(found, [worker]) == [Lower(host=4)]
    simulation.fleet.workers[worker].fail()
    simulation.fleet.index.remove(worker)
    assert dict(simulation.fleet.index.match([block_hash(0)])) == {}
    assert not simulation.fleet.index._holders, "no name is left"


def test_what_another_worker_has_below_is_brought_up_for_the_reader() -> None:
    simulation = run(FAST, 0, 100, 200, fleet="home:d:prefill:2,home:d:decode:1")
    holder = simulation.fleet.workers[WorkerId("home-prefill-0")]
    hashes = [block_hash(number) for number in range(4)]
    assert len(holder.pool.match(hashes)) < 4
    blocks, seconds = holder.lend(hashes, 1)
    assert len(blocks) == 3
    assert seconds > 0
    holder.take_back(blocks)
    assert holder.lend(hashes, 4) == ([], 0.0)
    holder.pool.check_integrity()


def test_a_busy_holder_brings_up_as_much_as_fits_beside_its_requests() -> None:
    simulation = run(FAST, 0, 100, 200, fleet="home:d:prefill:2,home:d:decode:1")
    holder = simulation.fleet.workers[WorkerId("home-prefill-0")]
    hashes = [block_hash(number) for number in range(4)]
    taken = holder.pool.allocate(3)
    num_held, pieces = 0, []
    while num_held < 4:
        blocks, _ = holder.lend(hashes, num_held)
        pieces.append(len(blocks))
        num_held += len(blocks)
        holder.take_back(blocks)
    assert pieces == [1, 3]
    holder.pool.release(taken)
    holder.pool.check_integrity()


def test_more_below_never_finds_less() -> None:
    """Sessions whose memory binds, over two workers."""
    made = make_requests(
        Workload(150, 0.2, profile().plan.lengths, output_tokens=8, turns=5, num_shared=2), 7
    )
    short = tuple(each for each in made if each.input_tokens < 20 * 512)
    found = []
    for tiers in (TierSizes(), FAST, TierSizes(host_blocks=400), TierSizes(40, 400)):
        plan = scenario(*short, fleet="home:d:hybrid:2", device={"num_blocks": 24}, tiers=tiers)
        simulation = Simulation(dataclasses.replace(plan, system=SYSTEMS["kvmesh"]))
        simulation.run()
        found.append(cached_tokens(simulation))
        for worker in simulation.fleet.workers.values():
            worker.pool.check_integrity()
    assert isinstance(plan, Scenario)
    assert found[0] < found[1] < found[2] * 1.05
    assert found[3] > found[0]
