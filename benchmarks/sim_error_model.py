"""The loads of `benchmarks.sim_error_load` in the simulator.

Tests: tests/unit/benchmarks/test_sim_error.py.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.result import Row
from benchmarks.sim_error_load import (
    LENGTHS,
    NUM_PREFIXES,
    OUTPUT_TOKENS,
    Arrival,
    Stack,
    length_of,
    metrics,
    prefix_of,
)
from kvmesh.sim.fields import Fields
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.profile import Profile
from kvmesh.sim.profile_file import parse_profile
from kvmesh.sim.requests import Outcome
from kvmesh.sim.scenario import Scenario
from kvmesh.sim.simulation import simulate
from kvmesh.sim.steps import ChunkTokens
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest

COOL_S = 5.0
"""Seconds between the requests that warm the workers and a load."""

CHUNK_TOKENS = 512
"""As `kvmesh up` starts its workers."""


@dataclass(frozen=True, slots=True)
class Modelled:
    """What the simulator says of a load: of those that were served, in seconds.

    Attributes:
        aggregated: share of the requests whose prompt was computed where they were decoded.
    """

    ttft_s: list[float]
    tpot_s: list[float]
    aggregated: float


def slowed(record: Mapping[str, Any], times: float) -> Profile:
    """The profile of a file on a machine on which everything takes so many times as long."""
    made = copy.deepcopy(dict(record))
    for device in made["devices"].values():
        device["prefill_s"]["points"] = [
            [length, times * seconds] for length, seconds in device["prefill_s"]["points"]
        ]
        device["decode_s"] = {name: times * each for name, each in device["decode_s"].items()}
    for name in ("inside_gbps", "between_gbps"):
        made["links"][name] /= times
    made["links"]["latency_s"] *= times
    for costs in (made["sharing"]["front"], made["sharing"]["loop"]):
        costs |= {name: times * each for name, each in costs.items() if name.endswith("_s")}
    return parse_profile(Fields(made, "profile"))


def scenario(
    profile: Profile, stack: Stack, traces: Sequence[TraceRequest], *, closed: bool
) -> Scenario:
    """The stack as `kvmesh up` starts it.

    Live workers reject what they cannot begin, whatever the policy, and report each change.
    """
    system = dataclasses.replace(
        SYSTEMS[stack.policy], queue_offers=False, rejects_early=False, report_interval_s=0.0
    )
    return Scenario(
        profile,
        parse_fleet(f"home:cpu:prefill:{stack.prefill},home:cpu:decode:{stack.decode}"),
        system,
        tuple(traces),
        closed_loop=closed,
        chunks=ChunkTokens(CHUNK_TOKENS, CHUNK_TOKENS),
    )


def _ids(number: int, arrival: Arrival) -> tuple[int, ...]:
    """Ids of a prompt's blocks; those up to `NUM_PREFIXES` are shared."""
    first = NUM_PREFIXES + 1 + 8 * number
    fresh = range(first, first + -(-arrival.tokens // TRACE_BLOCK))
    return (arrival.prefix, *fresh) if arrival.prefix else tuple(fresh)


def simulated(
    profile: Profile, stack: Stack, load: Sequence[Arrival], warm: Sequence[Arrival]
) -> Modelled:
    """The same arrivals in the simulator, after those that warm its workers."""
    start_s = max((each.at_s for each in warm), default=0.0) + COOL_S
    later = [dataclasses.replace(each, at_s=start_s + each.at_s) for each in load]
    traces = [
        TraceRequest(each.at_s, each.input_tokens, OUTPUT_TOKENS, _ids(number, each))
        for number, each in enumerate((*warm, *later))
    ]
    result = simulate(scenario(profile, stack, traces, closed=False))
    served = [
        each
        for each in result.requests
        if each.arrival_s >= start_s and each.outcome is not Outcome.REFUSED
    ]
    together = sum(each.prefill_on == each.decode_on for each in served)
    return Modelled(
        [each.ttft_s for each in served if each.ttft_s is not None],
        [each.tpot_s for each in served if each.tpot_s is not None],
        together / max(len(served), 1),
    )


def simulated_rate(profile: Profile, stack: Stack, users: int, seconds: float, seed: int) -> float:
    """As `sustained`, in the simulator."""
    draw = random.Random(seed)
    # More than anybody asks in that time; what is due later is not counted.
    turns = int(seconds / max(profile.devices["cpu"].prefill_s(LENGTHS[0]), 0.01))
    traces: list[TraceRequest] = []
    for number in range(users * turns):
        user, turn = divmod(number, turns)
        each = Arrival(float(turn), length_of(draw), prefix_of(draw))
        ids, tokens = _ids(number, each), each.input_tokens
        traces.append(TraceRequest(each.at_s, tokens, OUTPUT_TOKENS, ids, f"u{user}", turn))
    result = simulate(scenario(profile, stack, traces, closed=True))
    ended = [each.finished_s for each in result.requests if each.outcome is not Outcome.REFUSED]
    counted = [at for at in ended if at is not None and seconds / 4 < at <= seconds]
    return len(counted) / (0.75 * seconds)


def pooled(models: Sequence[Modelled]) -> Modelled:
    """Several seeds as one load."""
    return Modelled(
        [each for model in models for each in model.ttft_s],
        [each for model in models for each in model.tpot_s],
        statistics.mean(model.aggregated for model in models),
    )


def modelled_metrics(models: Sequence[Modelled]) -> Row:
    """The metrics of a load in several seeds."""
    found = pooled(models)
    return metrics(found.ttft_s, found.tpot_s, found.aggregated)
