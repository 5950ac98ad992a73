"""Evictions that the fleet decides, simulated: what full workers give up, and what they keep."""

from __future__ import annotations

import dataclasses

from kvmesh.policy.global_lru import PoolEviction
from kvmesh.sim.requests import block_hash
from kvmesh.sim.simulation import Simulation
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.tiers import TierSizes
from kvmesh.sim.workload import Workload, make_requests
from tests.unit.sim.examples import profile, scenario, trace


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


def test_what_another_worker_keeps_leaves_first() -> None:
    plan = scenario(trace(), fleet="home:d:hybrid:2", device={"num_blocks": 8})
    simulation = Simulation(dataclasses.replace(plan, eviction=PoolEviction.GLOBAL))
    full, other = simulation.fleet.workers.values()
    names = [block_hash(number) for number in range(8)]
    for worker, held in ((full, names[2:]), (full, names[:2]), (other, names[:2])):
        blocks = worker.pool.allocate(len(held))
        for block, key in zip(blocks, held, strict=True):
            worker.pool.seal(block, key)
        worker.pool.release(blocks)
        simulation.fleet.note_change(worker)
    assert full.pool.oldest(1) == [names[7]]
    assert simulation.eviction is not None
    simulation.eviction._end_window()
    assert full.pool.oldest(3) == [names[1], names[0], names[7]]
    assert simulation.eviction.given_up == {"pool": 2}
