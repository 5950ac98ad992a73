"""Loads on a running stack: `python -m benchmarks.sim_error` runs this inside `kvmesh up`, for each
fleet and policy.

Tests: tests/unit/benchmarks/test_sim_error.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.poisson import poisson_times
from benchmarks.result import Row
from kvmesh.cli.bench_load import find_model
from kvmesh.cli.stack_client import VOCAB, StackClient, Timing
from kvmesh.cli.stack_costs import TINY, measure_step, median_step
from kvmesh.core.config import environment
from kvmesh.core.summary_statistics import percentile
from kvmesh.sim.trace_request import TRACE_BLOCK

LENGTHS = (64, 640)
"""Fewest and most tokens of a prompt after its shared prefix; log-uniform between them.

Not a few lengths: a percentile between two of them would jump from one to the other.
"""

OUTPUT_TOKENS = 32

NUM_PREFIXES, SHARED = 4, 0.5
"""Shared prefixes of one simulated block, and the part of the prompts that begin with one."""

SUSTAINED_S = 12.0
"""Users who each ask again at once, for so long, show the rate that is sustained."""

WARM_S, WARM_SHARE, WARM_SEED = 12.0, 0.5, 1000
"""Requests that come before all loads, and count in none: workers have the shared prefixes then."""

PROBES = 3
"""Lone requests before and after a load, whose steps tell how fast the machine is."""

PERCENTILES = (50, 90, 99)
PLACED = "prompts computed where decoded, %"


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


def length_of(draw: random.Random) -> int:
    """Tokens of a prompt after its shared prefix."""
    return round(math.exp(draw.uniform(*map(math.log, LENGTHS))))


def prefix_of(draw: random.Random) -> int:
    """The number of a shared prefix, or 0; the n-th one has the weight 1/n."""
    numbers = range(1, NUM_PREFIXES + 1)
    weights = [1 / number for number in numbers]
    return draw.choices(numbers, weights)[0] if draw.random() < SHARED else 0


def arrivals(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Poisson arrivals of prompts of mixed length."""
    draw = random.Random(seed)
    return [
        Arrival(at_s, length_of(draw), prefix_of(draw))
        for at_s in poisson_times(draw, rate, 0.0, seconds)
    ]


def warming(rate: float) -> list[Arrival]:
    """The requests that come before all loads of a stack that sustains a rate."""
    return arrivals(WARM_SHARE * rate, WARM_S, WARM_SEED)


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


async def sustained(client: StackClient, users: int, seconds: float, seed: int) -> float:
    """Requests per second of users who each ask again when they have their answer.

    Their prompts are like those of the loads.
    """
    draw = random.Random(seed)
    started = time.perf_counter()

    async def user() -> list[float]:
        ended: list[float] = []
        while time.perf_counter() < started + seconds:
            prompt = prompt_of(Arrival(0.0, length_of(draw), prefix_of(draw)), draw)
            if await client.complete_prompt(prompt, OUTPUT_TOKENS) is not None:
                ended.append(time.perf_counter() - started)
        return ended

    ended = [at for each in await asyncio.gather(*(user() for _ in range(users))) for at in each]
    # The first quarter fills the batch; after the end some have stopped.
    counted = [at for at in ended if seconds / 4 < at <= seconds]
    return len(counted) / (0.75 * seconds)


def metrics(ttft_s: Sequence[float], tpot_s: Sequence[float], aggregated: float) -> Row:
    """Metrics of a load: percentiles in milliseconds, and the share of aggregated requests."""
    found: Row = {
        f"{name} p{percent}": round(1000 * percentile(values, percent), 2)
        for name, values in (("ttft", ttft_s), ("tpot", tpot_s))
        for percent in PERCENTILES
    }
    return {**found, PLACED: round(100 * aggregated, 1)}


def measured(by_seed: Sequence[Sequence[Timing]]) -> Row:
    """The metrics of a load in several seeds, of all and of each, and how many were answered."""

    def of(timings: Sequence[Timing]) -> Row:
        together = sum(each.placement == "aggregated" for each in timings) / len(timings)
        ttft_s, tpot_s = [each.ttft_s for each in timings], [each.tpot_s for each in timings]
        return metrics(ttft_s, tpot_s, together)

    pooled = [each for timings in by_seed for each in timings]
    return {"requests": len(pooled), **of(pooled), "by_seed": [of(each) for each in by_seed]}


def seeds_of(share: float, seed: int, count: int) -> list[int]:
    """Seeds of the load with this share of the rate."""
    return [seed + round(10 * share) + 10 * each for each in range(count)]


async def lone_step_s(client: StackClient) -> float:
    """Seconds of a decode step of a lone request now."""
    steps = [await measure_step(client, 1, TINY) for _ in range(PROBES)]
    return median_step(steps).step_s


@dataclass(frozen=True, slots=True)
class Sent:
    """A load that was sent.

    Attributes:
        slower: time of lone steps before and after it, over those of the profile.
    """

    timings: list[Timing]
    slower: float


async def send_and_probe(
    client: StackClient, load: Sequence[Arrival], seed: int, step_s: float
) -> Sent:
    """Sends a load between two looks at the machine, which other tenants slow for minutes.

    Args:
        step_s: seconds of a lone decode step in the profile; 0 for steps that no tenant slows.
    """
    if not step_s:
        return Sent(await send(client, load, seed), 1.0)
    before_s = await lone_step_s(client)
    timings = await send(client, load, seed)
    after_s = await lone_step_s(client)
    return Sent(timings, (before_s + after_s) / 2 / step_s)


async def run(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The rate that is sustained, unless one is given, then all loads with all seeds."""
    seed = arguments.seed
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        client = StackClient(session, url, await find_model(url), seed)
        rate = arguments.rate
        if not rate:
            rate = round(await sustained(client, arguments.users, SUSTAINED_S, seed), 2)
        await send(client, warming(rate), WARM_SEED)
        loads: list[Row] = []
        for share in arguments.loads:
            by_seed: list[Sent] = []
            for own in seeds_of(share, seed, arguments.seeds):
                load = arrivals(share * rate, arguments.seconds, own)
                note = f"{len(load)} requests, {share:g} of {rate:.1f}/s, seed {own}"
                sys.stderr.write(f"{arguments.label}: {note}\n")
                by_seed.append(await send_and_probe(client, load, own, arguments.step_s))
            found = measured([each.timings for each in by_seed])
            slower = [round(each.slower, 3) for each in by_seed]
            loads.append({"share": share, "slower": slower, **found})
    return {"rate": rate, "loads": loads}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs and writes what was measured."""
    parser = argparse.ArgumentParser("python -m benchmarks.sim_error_load")
    parser.add_argument("--label", required=True, help="of the stack, for what is printed")
    parser.add_argument("--loads", type=float, nargs="+", required=True, help="shares of the rate")
    parser.add_argument("--rate", type=float, default=0.0, help="requests/s; 0: what is sustained")
    parser.add_argument("--users", type=int, required=True, help="by how many users")
    parser.add_argument("--seconds", type=float, required=True, help="of a load with each seed")
    parser.add_argument("--seed", type=int, required=True, help="the first one")
    parser.add_argument("--seeds", type=int, required=True, help="number of seeds of each load")
    parser.add_argument(
        "--step-s", type=float, default=0.0, help="lone step in the profile; 0: not compared"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    url = environment("KVMESH_URL", "http://127.0.0.1:8000").rstrip("/")
    arguments.out.write_text(json.dumps(asyncio.run(run(url, arguments))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
