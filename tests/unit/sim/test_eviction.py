"""Evictions that the fleet decides, simulated: what full workers give up, and what they keep."""

from __future__ import annotations

import dataclasses

from kvmesh.policy.global_lru import PoolEviction
from kvmesh.sim.simulation import Simulation
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.tiers import TierSizes
from kvmesh.sim.workload import Workload, make_requests
from tests.unit.sim.examples import profile, scenario


def run(eviction: PoolEviction, tiers: TierSizes) -> Simulation:
    """Sessions whose memory binds, over three workers of a kind."""
    made = make_requests(
        Workload(150, 0.5, profile().plan.lengths, output_tokens=8, turns=5, num_shared=2), 7
    )
    short = tuple(each for each in made if each.input_tokens < 20 * 512)
    plan = scenario(*short, fleet="home:d:hybrid:3", device={"num_blocks": 24}, tiers=tiers)
    system = SYSTEMS["kvmesh"]
    simulation = Simulation(dataclasses.replace(plan, system=system, eviction=eviction))
    simulation.run()
    for worker in simulation.fleet.workers.values():
        worker.pool.check_integrity()
    return simulation


def test_workers_alone_give_up_nothing_for_others() -> None:
    assert run(PoolEviction.LOCAL, TierSizes()).eviction is None


def test_full_pools_and_tiers_give_up_second_copies() -> None:
    simulation = run(PoolEviction.GLOBAL, TierSizes(host_blocks=24))
    assert simulation.eviction is not None
    assert set(simulation.eviction.given_up) == {"pool", "host"}
    assert all(count > 0 for count in simulation.eviction.given_up.values())


def test_the_index_knows_who_holds_which_block() -> None:
    simulation = run(PoolEviction.GLOBAL, TierSizes())
    workers = simulation.fleet.workers
    held = {name: set(worker.pool.held_hashes()) for name, worker in workers.items()}
    assert any(held.values())
    everything = set().union(*held.values())
    assert simulation.fleet.index.holders(workers, everything) == held
