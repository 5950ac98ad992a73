"""A load on a running stack, and the same load in the simulator: `python -m benchmarks.sim_error`
runs this inside `kvmesh up`, for every fleet and policy.

Tests: tests/unit/cli/test_stack_costs.py.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.poisson import poisson_times
from benchmarks.result import Row
from kvmesh.cli.bench_load import find_model
from kvmesh.cli.stack_client import VOCAB, StackClient, Timing
from kvmesh.core.config import environment
from kvmesh.core.summary_statistics import percentile
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.profile import Profile
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.requests import Outcome
from kvmesh.sim.scenario import Scenario
from kvmesh.sim.simulation import simulate
from kvmesh.sim.steps import ChunkTokens
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest

LENGTHS = (64, 128, 320, 640)
"""Tokens of a prompt after its shared prefix."""

OUTPUT_TOKENS = 32

NUM_PREFIXES, SHARED = 4, 0.5
"""Shared prefixes of one simulated block, and the part of the prompts that begin with one."""

NUM_USERS = 8
SUSTAINED_S = 12.0
"""So many users who each ask again at once, for so long, show the rate that is sustained."""

WARM_S, WARM_SHARE, WARM_SEED = 12.0, 0.5, 1000
"""Requests that come before all loads, and count in none: workers have the shared prefixes then."""

COOL_S = 5.0
"""Seconds between them and a simulated load."""

CHUNK_TOKENS = 512
"""As `kvmesh up` starts its workers."""

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Stack:
    """What runs.

    Attributes:
        policy: of the scheduler and of the simulated system.
    """

    prefill: int
    decode: int
    policy: str

    @property
    def label(self) -> str:
        """Name in the tables."""
        return f"{self.prefill}+{self.decode} {self.policy}"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load.

    Attributes:
        prefix: number of its shared prefix; 0 for none.
    """

    at_s: float
    tokens: int
    prefix: int = 0

    @property
    def input_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return self.tokens + (TRACE_BLOCK if self.prefix else 0)


def _prefix(draw: random.Random) -> int:
    """The number of a shared prefix, or 0; the n-th one has the weight 1/n."""
    numbers = range(1, NUM_PREFIXES + 1)
    weights = [1 / number for number in numbers]
    return draw.choices(numbers, weights)[0] if draw.random() < SHARED else 0


def arrivals(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Poisson arrivals of prompts of mixed length."""
    draw = random.Random(seed)
    return [
        Arrival(at_s, draw.choice(LENGTHS), _prefix(draw))
        for at_s in poisson_times(draw, rate, 0.0, seconds)
    ]


def prompt_of(arrival: Arrival, draw: random.Random) -> list[int]:
    """Token ids: those of the shared prefix, then others that no prompt has."""
    head: list[int] = []
    if arrival.prefix:
        shared = random.Random(arrival.prefix)
        head = [shared.randrange(*VOCAB) for _ in range(TRACE_BLOCK)]
    return head + [draw.randrange(*VOCAB) for _ in range(arrival.tokens)]


async def send(client: StackClient, load: Sequence[Arrival], seed: int) -> list[Timing]:
    """Sends every request when it is due; those that were refused are left out."""
    draw = random.Random(seed)
    prompts = [prompt_of(each, draw) for each in load]
    started = time.perf_counter()

    async def one(arrival: Arrival, prompt: list[int]) -> Timing | None:
        await asyncio.sleep(started + arrival.at_s - time.perf_counter())
        return await client.complete_prompt(prompt, OUTPUT_TOKENS)

    found = await asyncio.gather(*map(one, load, prompts))
    return [each for each in found if each is not None]


async def sustained(client: StackClient, seconds: float, seed: int) -> float:
    """Requests per second of users who each ask again when they have their answer.

    Their prompts are like those of the loads.
    """
    draw = random.Random(seed)
    started = time.perf_counter()

    async def user() -> list[float]:
        ended: list[float] = []
        while time.perf_counter() < started + seconds:
            prompt = prompt_of(Arrival(0.0, draw.choice(LENGTHS), _prefix(draw)), draw)
            if await client.complete_prompt(prompt, OUTPUT_TOKENS) is not None:
                ended.append(time.perf_counter() - started)
        return ended

    ended = [
        at for each in await asyncio.gather(*(user() for _ in range(NUM_USERS))) for at in each
    ]
    # The first quarter fills the batch; after the end some have stopped.
    counted = [at for at in ended if seconds / 4 < at <= seconds]
    return len(counted) / (0.75 * seconds)


@dataclass(frozen=True, slots=True)
class Modelled:
    """What the simulator says of a load: of those that were served, in seconds.

    Attributes:
        aggregated: share of the requests whose prompt was computed where they were decoded.
    """

    ttft_s: list[float]
    tpot_s: list[float]
    aggregated: float


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


def simulated_rate(profile: Profile, stack: Stack, seconds: float, seed: int) -> float:
    """As `sustained`, in the simulator."""
    draw = random.Random(seed)
    # More than anybody asks in that time; what is due later is not counted.
    turns = int(seconds / max(profile.devices["cpu"].prefill_s(LENGTHS[0]), 0.01))
    traces: list[TraceRequest] = []
    for number in range(NUM_USERS * turns):
        user, turn = divmod(number, turns)
        each = Arrival(float(turn), draw.choice(LENGTHS), _prefix(draw))
        ids, tokens = _ids(number, each), each.input_tokens
        traces.append(TraceRequest(each.at_s, tokens, OUTPUT_TOKENS, ids, f"u{user}", turn))
    result = simulate(scenario(profile, stack, traces, closed=True))
    ended = [each.finished_s for each in result.requests if each.outcome is not Outcome.REFUSED]
    counted = [at for at in ended if at is not None and seconds / 4 < at <= seconds]
    return len(counted) / (0.75 * seconds)


def compare(stack: Stack, load: str, measured: Sequence[Timing], modelled: Modelled) -> list[Row]:
    """One row per metric and percentile; times in milliseconds."""
    rows: list[Row] = []
    begin: Row = {"stack": stack.label, "load": load, "requests": len(measured)}
    real = ([each.ttft_s for each in measured], [each.tpot_s for each in measured])
    models = (modelled.ttft_s, modelled.tpot_s)
    for name, seen, made in zip(("ttft", "tpot"), real, models, strict=True):
        for percent in PERCENTILES:
            was, says = 1000 * percentile(seen, percent), 1000 * percentile(made, percent)
            rows.append(
                {
                    **begin,
                    "metric": f"{name} p{percent}",
                    "measured": round(was, 2),
                    "simulated": round(says, 2),
                    "error_percent": round(100 * (says / was - 1), 1),
                }
            )
    together = sum(each.placement == "aggregated" for each in measured) / len(measured)
    rows.append(
        {
            **begin,
            "metric": "prompts computed where decoded, %",
            "measured": round(100 * together, 1),
            "simulated": round(100 * modelled.aggregated, 1),
        }
    )
    return rows


def rate_row(stack: Stack, measured: float, modelled: float) -> Row:
    """What eight users in a closed loop get."""
    return {
        "stack": stack.label,
        "load": f"{NUM_USERS} users",
        "metric": "requests/s",
        "measured": round(measured, 2),
        "simulated": round(modelled, 2),
        "error_percent": round(100 * (modelled / measured - 1), 1),
    }


def pooled(models: Sequence[Modelled]) -> Modelled:
    """Several seeds as one load."""
    return Modelled(
        [each for model in models for each in model.ttft_s],
        [each for model in models for each in model.tpot_s],
        statistics.mean(model.aggregated for model in models),
    )


async def run(url: str, arguments: argparse.Namespace) -> list[Row]:
    """The rate that is sustained, unless one is given, then all loads with all seeds."""
    stack = Stack(arguments.prefill, arguments.decode, arguments.policy)
    profile, seed = load_profile(arguments.profile), arguments.seed
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        client = StackClient(session, url, await find_model(url), seed)
        rows: list[Row] = []
        rate = arguments.rate
        if not rate:
            rate = await sustained(client, SUSTAINED_S, seed)
            rows.append(rate_row(stack, rate, simulated_rate(profile, stack, SUSTAINED_S, seed)))
        warm = arrivals(WARM_SHARE * rate, WARM_S, WARM_SEED)
        await send(client, warm, WARM_SEED)
        for number, share in enumerate(arguments.loads):
            timings: list[Timing] = []
            models: list[Modelled] = []
            for each in range(arguments.seeds):
                own = seed + number + len(arguments.loads) * each
                load = arrivals(share * rate, arguments.seconds, own)
                note = f"{len(load)} requests, {share:g} of {rate:.1f}/s, seed {own}"
                sys.stderr.write(f"{stack.label}: {note}\n")
                timings += await send(client, load, own)
                models.append(simulated(profile, stack, load, warm))
            rows += compare(stack, f"{share:g}", timings, pooled(models))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs and writes the rows."""
    parser = argparse.ArgumentParser("python -m benchmarks.sim_error_load")
    parser.add_argument("--profile", required=True, help="file of kvmesh profile --url")
    parser.add_argument("--prefill", type=int, required=True)
    parser.add_argument("--decode", type=int, required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--loads", type=float, nargs="+", required=True, help="shares of the rate")
    parser.add_argument("--rate", type=float, default=0.0, help="requests/s; 0: what is sustained")
    parser.add_argument("--seconds", type=float, required=True, help="of a load with each seed")
    parser.add_argument("--seed", type=int, required=True, help="the first one")
    parser.add_argument("--seeds", type=int, required=True, help="number of seeds of each load")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    url = environment("KVMESH_URL", "http://127.0.0.1:8000").rstrip("/")
    arguments.out.write_text(json.dumps(asyncio.run(run(url, arguments))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
