"""The experiments on memory below pools: how much of it, against none and an infinite pool.

Tests: tests/unit/benchmarks/test_policies_capacity.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.policies_experiments import Experiment, Job, Outcome, Rows, Verdict, summary_row
from benchmarks.result import Row, Target
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.profile import Profile
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.report import summarize
from kvmesh.sim.scenario import Scenario
from kvmesh.sim.simulation import Simulation
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.tiers import TierSizes
from kvmesh.sim.trace import read_trace
from kvmesh.sim.trace_request import TraceRequest
from kvmesh.sim.workload import Workload, make_requests, spread_ticks

FLEET = "home:a100:prefill:4,home:a100:decode:4"
NUM_REQUESTS = 1000

SIZES = {
    "pool alone": (0, 0),
    "host 1x": (1, 0),
    "host 2x": (2, 0),
    "host 5x": (5, 0),
    "host 10x": (10, 0),
    "disk 10x": (0, 10),
    "host 2x, disk 10x": (2, 10),
}
"""Host memory and disk of each worker, in its pools."""

INFINITE = "infinite pool"
INFINITE_BLOCKS = 1_000_000
OF_INFINITE, BINDS, UNBOUND = 0.9, 2.0, 0.98
"""Least hits with ten pools of host memory, over an infinite pool; least goodput over the pool
alone, where memory binds and where it does not."""

ONE_TURN = "one turn"


def capacity(traces: Sequence[Path], size: float, seed: int) -> list[Experiment]:
    """A sweep for long made sessions, for every trace, and for prompts that nobody repeats."""
    count = int(NUM_REQUESTS * size)
    long = LengthDistribution.log_normal(8.0, 0.6, 1024, 8192)
    sessions = Workload(count, 1.2, long, turns=12, num_shared=4)
    workloads = {"long sessions": make_requests(sessions, seed)}
    for path in traces:
        workloads[path.name.split(".")[0]] = spread_ticks(read_trace(path, count), seed)
    workloads[ONE_TURN] = make_requests(Workload(count, 2.0, long), seed)
    return [_sweep(name, requests, seed) for name, requests in workloads.items()]


def _sweep(workload: str, requests: Sequence[TraceRequest], seed: int) -> Experiment:
    name = f"Tiers: {workload}"
    profile = load_profile("tokenlake")
    (device,) = profile.devices.values()
    plans = {
        label: (profile, TierSizes(host * device.num_blocks, disk * device.num_blocks))
        for label, (host, disk) in SIZES.items()
    }
    plans[INFINITE] = (_endless(profile), TierSizes())
    jobs = [
        Job(name, label, partial(_run, costs, tiers, tuple(requests), seed), len(requests))
        for label, (costs, tiers) in plans.items()
    ]
    return Experiment(name, jobs, partial(_judge, workload))


def _endless(profile: Profile) -> Profile:
    """Pools that never evict; prompts are still no longer than before."""
    devices = {
        name: dataclasses.replace(each, num_blocks=INFINITE_BLOCKS)
        for name, each in profile.devices.items()
    }
    return dataclasses.replace(profile, devices=devices)


def _run(
    profile: Profile, tiers: TierSizes, requests: tuple[TraceRequest, ...], seed: int
) -> Outcome:
    plan = Scenario(
        profile, parse_fleet(FLEET), SYSTEMS["kvmesh"], requests, seed=seed, tiers=tiers
    )
    simulation = Simulation(plan)
    row: Row = summary_row(summarize(simulation.run()))
    workers = simulation.fleet.workers.values()
    row["loaded blocks"] = sum(
        each.tiers.loaded_blocks for each in workers if each.tiers is not None
    )
    return Outcome(row)


def _judge(workload: str, rows: Rows) -> Verdict:
    alone, most, endless = rows["pool alone"], rows["host 10x"], rows[INFINITE]
    goodput = most["goodput/s"] / alone["goodput/s"]
    where = f"{workload}, host memory of ten pools"
    if workload == ONE_TURN:
        return Verdict([Target(f"{where}: goodput over the pool alone", goodput, UNBOUND)])
    hits = most["hits"] / endless["hits"]
    targets = [
        Target(f"{where}: hits over an infinite pool", hits, OF_INFINITE),
        Target(f"{where}: goodput over the pool alone", goodput, BINDS),
    ]
    lost = [label for label in SIZES if rows[label]["goodput/s"] < 0.98 * alone["goodput/s"]]
    about = f"{FLEET} of `tokenlake`, whose pools have 220 blocks of 512 tokens"
    return Verdict(targets, [about, f"goodput below the pool alone: {', '.join(lost) or 'none'}"])
