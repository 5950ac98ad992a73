"""The experiment on requests that are dispatched together: by time, by volume, and one by one.

Tests: tests/unit/benchmarks/test_policies_joint.py.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from functools import partial

from benchmarks.policies_experiments import (
    Experiment,
    Job,
    Outcome,
    Rows,
    Verdict,
    mean_row,
    summary_row,
)
from benchmarks.result import Row, Target
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.report import summarize
from kvmesh.sim.scenario import Scenario
from kvmesh.sim.simulation import Simulation
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.trace_request import TraceRequest
from kvmesh.sim.workload import Workload, make_requests

ONE_BY_ONE = "kvmesh"
TOGETHER = ("joint", "tokenlake")

FULL = "8/s"
"""Near capacity."""

LOADS = {
    "4/s at once": (4.0, 1.0),
    "5/s at once": (5.0, 2.0),
    "6/s": (6.0, 0.0),
    FULL: (8.0, 0.0),
}
"""Requests per second, and the seconds between the moments at which they come together."""

NUM_REQUESTS = 600
NUM_SEEDS = 6
MORE_SEEDS = {"6/s": 24, FULL: 36}
"""Where requests come one by one, few are decided on together, and one seed's mean goes either way
by three percent, at times by ten. Near capacity one seed's mean is up to half as long again as
another's, under the same policy: means of six go either way by a tenth."""

NAME = "TokenLake: joint dispatch"


def joint_dispatch(size: float, seed: int) -> Experiment:
    """Conversations behind eight shared prefixes, at equal memory; means of seeds."""
    profile = load_profile("flowkv")
    fleet = parse_fleet("home:a100:prefill:4,home:a100:decode:4")
    jobs: list[Job] = []
    for load, (rate, tick_s) in LOADS.items():
        num_seeds = MORE_SEEDS.get(load, NUM_SEEDS)
        seeds = range(seed, seed + num_seeds)
        requests = [_requests(int(NUM_REQUESTS * size), rate, tick_s, each) for each in seeds]
        for system in (ONE_BY_ONE, *TOGETHER):
            scenarios = [
                Scenario(profile, fleet, SYSTEMS[system], each, seed=number)
                for each, number in zip(requests, seeds, strict=True)
            ]
            label = f"{load} {system}"
            jobs.append(Job(NAME, label, partial(_run, scenarios), len(requests[0]) * num_seeds))
    return Experiment(NAME, jobs, _judge)


def _requests(count: int, rate: float, tick_s: float, seed: int) -> tuple[TraceRequest, ...]:
    plan = load_profile("flowkv").plan
    workload = Workload(
        count, rate, plan.lengths, output_tokens=plan.output_tokens, turns=4, num_shared=8
    )
    made = make_requests(workload, seed)
    if not tick_s:
        return made
    return tuple(
        dataclasses.replace(each, arrival_s=math.ceil(each.arrival_s / tick_s) * tick_s)
        for each in made
    )


def _run(scenarios: Sequence[Scenario]) -> Outcome:
    rows: list[Row] = []
    for scenario in scenarios:
        simulation = Simulation(scenario)
        result = simulation.run()
        row = summary_row(summarize(result))
        ttfts = [each.ttft_s for each in result.requests if each.ttft_s is not None]
        row["TTFT mean"] = statistics.mean(ttfts)
        row["moved tokens"] = simulation.fetches.tokens
        row["elsewhere"] = result.reasons["joint: moved"]
        rows.append(row)
    return Outcome(mean_row(rows))


def _judge(rows: Rows) -> Verdict:
    targets: list[Target] = []
    for load, (_, tick_s) in LOADS.items():
        alone, together = rows[f"{load} {ONE_BY_ONE}"], rows[f"{load} joint"]
        goodput = together["goodput/s"] / alone["goodput/s"]
        targets.append(Target(f"joint dispatch, {load}: goodput over one by one", goodput, 0.995))
        ttft = together["TTFT mean"] / alone["TTFT mean"]
        name = f"joint dispatch, {load}: mean TTFT over one by one"
        targets.append(Target(name, ttft, 1.0, at_most=True))
        if tick_s:
            moved = together["moved tokens"] / max(alone["moved tokens"], 1)
            name = f"joint dispatch, {load}: KV moved over one by one"
            targets.append(Target(name, moved, 0.9, at_most=True))
    seeds = ", ".join(f"{count} at {load}" for load, count in MORE_SEEDS.items())
    notes = [
        "`kvmesh` decides one by one; `elsewhere`: requests that were moved",
        f"means of {NUM_SEEDS} seeds, {seeds} (6/s: six until 2026-11-22)",
    ]
    return Verdict(targets, notes)
