"""The experiment on prompts that several prefill workers compute together, against one each.

Tests: tests/unit/benchmarks/test_policies_chains.py.
"""

from __future__ import annotations

import dataclasses
import random
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
from kvmesh.policy.pdserve import TimeoutTier
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.profile import Profile
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.report import summarize
from kvmesh.sim.scenario import Objectives, Scenario
from kvmesh.sim.simulation import Simulation
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest

NAME = "TokenLake: prompts on several workers"

NUM_WORKERS = 8
PROMPT_BLOCKS = 62
PROMPT_TOKENS = PROMPT_BLOCKS * TRACE_BLOCK
OUTPUT_TOKENS = 64
NUM_REQUESTS = 400
NUM_SEEDS = 2

LOADS = {0.1: 4.0, 0.5: 1.5, 1.0: 0.95, 1.2: 0.95}
"""Shares of what the prefill workers can compute, and by how much first tokens are to be sooner; at
capacity and above it nobody idles, and nothing is to be lost."""

GOODPUT = 0.99


def prompt_chains(size: float, seed: int) -> Experiment:
    """Prompts of 31,744 tokens, none of which is cached, on eight prefill workers."""
    profile = _roomy(load_profile("tokenlake"))
    jobs = []
    for load in LOADS:
        for chains in (False, True):
            scenarios = [
                _scenario(profile, load, int(NUM_REQUESTS * size), each, chains=chains)
                for each in range(seed, seed + NUM_SEEDS)
            ]
            weight = NUM_REQUESTS * size * NUM_SEEDS
            jobs.append(Job(NAME, label(load, chains=chains), partial(_run, scenarios), weight))
    return Experiment(NAME, jobs, _judge)


def _roomy(profile: Profile) -> Profile:
    """Blocks are not what is scarce here."""
    devices = {
        name: dataclasses.replace(each, num_blocks=2000) for name, each in profile.devices.items()
    }
    return dataclasses.replace(profile, devices=devices)


def label(load: float, *, chains: bool) -> str:
    """The name of a run."""
    return f"load {load:g}, {'several' if chains else 'one'}"


def _scenario(profile: Profile, load: float, count: int, seed: int, *, chains: bool) -> Scenario:
    draw = random.Random(seed)
    rate = load * NUM_WORKERS / profile.devices["a100"].prefill_s(PROMPT_TOKENS)
    requests: list[TraceRequest] = []
    now = 0.0
    for number in range(count):
        now += draw.expovariate(rate)
        ids = tuple(range(number * PROMPT_BLOCKS, (number + 1) * PROMPT_BLOCKS))
        requests.append(TraceRequest(now, PROMPT_TOKENS, OUTPUT_TOKENS, ids))
    return Scenario(
        profile,
        parse_fleet(f"home:a100:prefill:{NUM_WORKERS},home:a100:decode:{NUM_WORKERS}"),
        dataclasses.replace(SYSTEMS["kvmesh"], switch_roles=False, reallocate=False),
        tuple(requests),
        objectives=Objectives((TimeoutTier(1 << 62, 30.0),)),
        seed=seed,
        chains=chains,
    )


def _run(scenarios: list[Scenario]) -> Outcome:
    rows: list[Row] = []
    for scenario in scenarios:
        simulation = Simulation(scenario)
        row = summary_row(summarize(simulation.run()))
        row["tokens for others"] = simulation.chains.tokens
        rows.append(row)
    return Outcome(mean_row(rows))


def _judge(rows: Rows) -> Verdict:
    targets: list[Target] = []
    for load, goal in LOADS.items():
        one, several = (rows[label(load, chains=chains)] for chains in (False, True))
        sooner = one["TTFT p50"] / several["TTFT p50"]
        targets.append(Target(f"load {load:g}: median TTFT, times sooner", sooner, goal))
        goodput = several["goodput/s"] / one["goodput/s"]
        targets.append(Target(f"load {load:g}: goodput over one worker each", goodput, GOODPUT))
    about = f"{PROMPT_TOKENS:,} tokens, {NUM_WORKERS} prefill workers of `tokenlake`"
    return Verdict(targets, [about, f"means of {NUM_SEEDS} seeds; roles stay as they are"])
