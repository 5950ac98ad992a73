"""The experiments on memory below pools: how much of it, against none and an infinite pool, who
decides what leaves, and how much more load a fleet bears with it.

Tests: tests/unit/benchmarks/test_policies_capacity.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.policies_experiments import Experiment, Job, Outcome, Rows, Verdict, summary_row
from benchmarks.result import Row, Target
from kvmesh.policy.global_lru import PoolEviction
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.pdserve import TimeoutTier
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.pool_service import goodput_rate
from kvmesh.sim.profile import Profile
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.report import summarize
from kvmesh.sim.scenario import Objectives, Scenario
from kvmesh.sim.simulation import Simulation
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.tiers import TierSizes
from kvmesh.sim.trace import read_trace
from kvmesh.sim.trace_request import TraceRequest
from kvmesh.sim.workload import Workload, make_requests, scale_rate, spread_ticks

FLEET = "home:a100:prefill:2,home:a100:decode:6"
NUM_REQUESTS = 1000

LOADED = "flowkv", "home:a100:prefill:2,home:a100:decode:2"
"""Profile and fleet of the load sweep: decode must have room for several sessions, or it binds
before prompts do."""

FACTORS = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4, 2.6)
"""Of a trace's own rate."""

FIRST_TOKEN_S = (30.0, 10.0)
"""Longest waits for a first token of a long prompt: an agent's whole prompt is computed in about
ten seconds there."""

SIZES = {
    "pool alone": (0, 0),
    "host 1x": (1, 0),
    "host 2x": (2, 0),
    "host 5x": (5, 0),
    "host 10x": (10, 0),
    "disk 10x": (0, 10),
    "host 2x, disk 10x": (2, 10),
}
FLEET_DECIDES = ("pool alone", "host 2x", "host 10x")
"""Sizes that are run with evictions that the fleet decides, too."""
"""Host memory and disk of each worker, in its pools."""

INFINITE = "infinite pool"
INFINITE_BLOCKS = 1_000_000
OF_INFINITE, BINDS, UNBOUND = 0.9, 2.0, 0.98
"""Least hits with ten pools of host memory, over an infinite pool; least rate that is borne over
the pool alone's; least goodput of any size over the pool alone's."""

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
    found = [_sweep(name, requests, seed) for name, requests in workloads.items()]
    for path in traces:
        name = path.name.split(".")[0]
        found += [_loads(name, workloads[name], limit_s, seed) for limit_s in FIRST_TOKEN_S]
    return found


def _sweep(workload: str, requests: Sequence[TraceRequest], seed: int) -> Experiment:
    name = f"Tiers: {workload}"
    profile = load_profile("tokenlake")
    (device,) = profile.devices.values()
    plan = Scenario(profile, parse_fleet(FLEET), SYSTEMS["kvmesh"], tuple(requests), seed=seed)
    plans = {
        label: dataclasses.replace(
            plan, tiers=TierSizes(host * device.num_blocks, disk * device.num_blocks)
        )
        for label, (host, disk) in SIZES.items()
    }
    for label in FLEET_DECIDES:
        fleet = dataclasses.replace(plans[label], eviction=PoolEviction.GLOBAL)
        plans[by_fleet(label)] = fleet
    plans[INFINITE] = dataclasses.replace(plan, profile=_endless(profile))
    jobs = [Job(name, label, partial(_run, each), len(requests)) for label, each in plans.items()]
    return Experiment(name, jobs, partial(_judge, workload))


def by_fleet(label: str) -> str:
    """Name of a row whose evictions the fleet decides."""
    return f"{label}, global eviction"


def _loads(
    workload: str, requests: Sequence[TraceRequest], limit_s: float, seed: int
) -> Experiment:
    """How much faster a trace may come: pools alone against ten pools of host memory."""
    name = f"Load: {workload}, first token within {limit_s:g} s"
    profile, fleet = load_profile(LOADED[0]), parse_fleet(LOADED[1])
    (device,) = profile.devices.values()
    short, _ = Objectives().timeouts
    limits = Objectives((short, TimeoutTier(1 << 62, limit_s)))
    plan = Scenario(profile, fleet, SYSTEMS["kvmesh"], (), seed=seed, objectives=limits)
    plans = {
        f"{factor:g}x {label}": dataclasses.replace(
            plan,
            requests=scale_rate(requests, factor),
            tiers=TierSizes(host * device.num_blocks),
        )
        for label, host in (("pool alone", 0), ("host 10x", 10))
        for factor in FACTORS
    }
    plans[f"1x {INFINITE}"] = dataclasses.replace(
        plan, requests=tuple(requests), profile=_endless(profile)
    )
    jobs = [Job(name, label, partial(_run, each), len(requests)) for label, each in plans.items()]
    return Experiment(name, jobs, partial(_judge_loads, workload, limit_s))


def _endless(profile: Profile) -> Profile:
    """Pools that never evict; they also run the prompts that are longer than a finite pool."""
    devices = {
        name: dataclasses.replace(each, num_blocks=INFINITE_BLOCKS)
        for name, each in profile.devices.items()
    }
    return dataclasses.replace(profile, devices=devices)


def _run(plan: Scenario) -> Outcome:
    simulation = Simulation(plan)
    row: Row = summary_row(summarize(simulation.run()))
    workers = simulation.fleet.workers.values()
    row["loaded blocks"] = sum(
        each.tiers.loaded_blocks for each in workers if each.tiers is not None
    )
    if simulation.eviction is not None:
        given_up = simulation.eviction.given_up
        row["given up"] = " ".join(f"{tier}:{num}" for tier, num in sorted(given_up.items()))
    return Outcome(row)


def _judge(workload: str, rows: Rows) -> Verdict:
    alone, most, endless = rows["pool alone"], rows["host 10x"], rows[INFINITE]
    worst = min(SIZES, key=lambda label: float(rows[label]["goodput/s"]))
    targets = [
        Target(
            f"{workload}: goodput of the worst size over the pool alone",
            rows[worst]["goodput/s"] / alone["goodput/s"],
            UNBOUND,
        )
    ]
    if workload == ONE_TURN:
        return Verdict(targets)
    hits = most["hits"] / endless["hits"]
    where = f"{workload}, host memory of ten pools: hits over an infinite pool"
    targets.append(Target(where, hits, OF_INFINITE))
    notes = [
        f"{FLEET} of `tokenlake`, whose pools (220 blocks of 512 tokens) hold 1.8 agents' prompts"
    ]
    for label in FLEET_DECIDES:
        one, other = rows[by_fleet(label)], rows[label]
        notes.append(
            f"{label}, evictions that the fleet decides: hits {other['hits']} to {one['hits']},"
            f" goodput {other['goodput/s']} to {one['goodput/s']}"
        )
    return Verdict(targets, notes)


def _judge_loads(workload: str, limit_s: float, rows: Rows) -> Verdict:
    borne = {
        label: goodput_rate((factor, rows[f"{factor:g}x {label}"]["success"]) for factor in FACTORS)
        for label in ("pool alone", "host 10x")
    }
    where = f"{workload}, first token within {limit_s:g} s, host memory of ten pools"
    over = borne["host 10x"] / borne["pool alone"] if borne["pool alone"] else None
    hits = rows["1x host 10x"]["hits"] / rows[f"1x {INFINITE}"]["hits"]
    targets = [
        Target(f"{where}: P90 goodput over the pool alone", over, BINDS),
        Target(f"{where}: hits over an infinite pool, at the trace's rate", hits, OF_INFINITE),
    ]
    notes = [f"{LOADED[1]} of `{LOADED[0]}`, whose pools have 800 blocks of 512 tokens"]
    notes += [f"{label}: {factor:g} times the trace's rate" for label, factor in borne.items()]
    return Verdict(targets, notes)
