"""The simulator against the real stack: the same requests, measured and simulated.

    kvmesh up --prefill 1 --decode 1 --port 0 --run 'python -m benchmarks.sim_error'

Profiles the stack roughly, sends Poisson loads, simulates the same arrivals with the profile and
the policy that the scheduler runs, and reports the error of the percentiles.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.poisson import poisson_times
from benchmarks.result import RESULTS, ROOT, Row, document, markdown, save
from benchmarks.stack_client import StackClient, Timing
from benchmarks.stack_profile import make_profile, measure
from kvmesh.cli.bench_load import find_model
from kvmesh.core.config import environment
from kvmesh.core.summary_statistics import percentile
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.profile import Profile
from kvmesh.sim.requests import Outcome
from kvmesh.sim.scenario import Scenario
from kvmesh.sim.simulation import simulate
from kvmesh.sim.steps import ChunkTokens
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest

LENGTHS = (64, 128, 320, 640)
OUTPUT_TOKENS = 32
LOADS = (0.2, 0.5, 0.8)
"""Shares of the rate that was sustained."""

NUM_USERS = 8
SUSTAINED_S = 12.0
"""So many users who each ask again at once, for so long, show the rate that is sustained."""

PREFILL_SLOTS, DECODE_SLOTS = 1, 32
CHUNK_TOKENS = 512
"""As `kvmesh up` starts its workers."""

PERCENTILES = (50, 90, 99)

NOTES = """\
one prefill and one decode worker, a gateway, scheduler, kvmanager, Redis and the client that sends
 share the cores of the machine
- the profile is measured from outside: first tokens of lone prompts, steps of batches of 1, 4 and
 8, the gap between first and second token; then prompts of 512 tokens beside a batch of 4
- in the simulator both workers are on one host: a chunk or a step takes as many times as long while
 the other worker computes as it was measured; the processor time that gateway, scheduler and client
 take for a request, a token and a worker that refuses was measured too, and where all want more
 cores than there are the workers divide what these leave; what a worker's loop does for a request
 or a refusal its next step waits for
- error is simulated / measured - 1; load is the share of the rate at which eight users in a closed
 loop were served""".replace("\n ", " ").split("\n- ")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load."""

    at_s: float
    input_tokens: int


def arrivals(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Poisson arrivals of prompts of mixed length."""
    draw = random.Random(seed)
    times = poisson_times(draw, rate, 0.0, seconds)
    return [Arrival(at_s, draw.choice(LENGTHS)) for at_s in times]


async def send(client: StackClient, load: Sequence[Arrival]) -> list[Timing]:
    """Sends every request when it is due; those that were refused are left out."""
    started = time.perf_counter()

    async def one(arrival: Arrival) -> Timing | None:
        await asyncio.sleep(started + arrival.at_s - time.perf_counter())
        return await client.complete(arrival.input_tokens, OUTPUT_TOKENS)

    found = await asyncio.gather(*map(one, load))
    return [each for each in found if each is not None]


async def sustained(client: StackClient, seconds: float, seed: int) -> float:
    """Requests per second of users who each ask again when they have their answer."""
    draw = random.Random(seed)
    started = time.perf_counter()

    async def user() -> list[float]:
        ended: list[float] = []
        while time.perf_counter() < started + seconds:
            if await client.complete(draw.choice(LENGTHS), OUTPUT_TOKENS) is not None:
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


def scenario(profile: Profile, traces: Sequence[TraceRequest], *, closed: bool) -> Scenario:
    """The stack as `kvmesh up` starts it, with one worker of each side."""
    # There is nobody to switch.
    system = dataclasses.replace(SYSTEMS["kvmesh"], switch_roles=False, reallocate=False)
    return Scenario(
        profile,
        parse_fleet("home:cpu:prefill:1,home:cpu:decode:1"),
        system,
        tuple(traces),
        closed_loop=closed,
        chunks=ChunkTokens(CHUNK_TOKENS, CHUNK_TOKENS),
    )


def _fresh(number: int, tokens: int) -> tuple[int, ...]:
    """Ids of the blocks of a prompt that is like no other."""
    return tuple(range(8 * number, 8 * number + -(-tokens // TRACE_BLOCK)))


def simulated(profile: Profile, load: Sequence[Arrival]) -> Modelled:
    """The same arrivals in the simulator."""
    traces = [
        TraceRequest(each.at_s, each.input_tokens, OUTPUT_TOKENS, _fresh(number, each.input_tokens))
        for number, each in enumerate(load)
    ]
    result = simulate(scenario(profile, traces, closed=False))
    served = [each for each in result.requests if each.outcome is not Outcome.REFUSED]
    together = sum(each.prefill_on == each.decode_on for each in served)
    return Modelled(
        [each.ttft_s for each in served if each.ttft_s is not None],
        [each.tpot_s for each in served if each.tpot_s is not None],
        together / max(len(served), 1),
    )


def simulated_rate(profile: Profile, seconds: float, seed: int) -> float:
    """As `sustained`, in the simulator."""
    draw = random.Random(seed)
    # More than anybody asks in that time; what is due later is not counted.
    turns = int(seconds / max(profile.devices["cpu"].prefill_s(LENGTHS[0]), 0.01))
    traces: list[TraceRequest] = []
    for number in range(NUM_USERS * turns):
        user, turn = divmod(number, turns)
        tokens = draw.choice(LENGTHS)
        ids = _fresh(number, tokens)
        traces.append(TraceRequest(float(turn), tokens, OUTPUT_TOKENS, ids, f"u{user}", turn))
    result = simulate(scenario(profile, traces, closed=True))
    ended = [each.finished_s for each in result.requests if each.outcome is not Outcome.REFUSED]
    counted = [at for at in ended if at is not None and seconds / 4 < at <= seconds]
    return len(counted) / (0.75 * seconds)


def compare(share: float, measured: Sequence[Timing], modelled: Modelled) -> list[Row]:
    """One row per metric and percentile; times in milliseconds."""
    rows: list[Row] = []
    real = ([each.ttft_s for each in measured], [each.tpot_s for each in measured])
    models = (modelled.ttft_s, modelled.tpot_s)
    for name, seen, made in zip(("ttft", "tpot"), real, models, strict=True):
        for percent in PERCENTILES:
            was, says = 1000 * percentile(seen, percent), 1000 * percentile(made, percent)
            rows.append(
                {
                    "load": share,
                    "requests": len(measured),
                    "metric": f"{name} p{percent}",
                    "measured_ms": round(was, 2),
                    "simulated_ms": round(says, 2),
                    "error_percent": round(100 * (says / was - 1), 1),
                }
            )
    together = sum(each.placement == "aggregated" for each in measured) / len(measured)
    rows.append(
        {
            "load": share,
            "requests": len(measured),
            "metric": "prompts computed where decoded",
            "measured_percent": round(100 * together, 1),
            "simulated_percent": round(100 * modelled.aggregated, 1),
        }
    )
    return rows


def rate_row(measured: float, modelled: float) -> Row:
    """What eight users in a closed loop get."""
    return {
        "load": f"{NUM_USERS} users",
        "metric": "requests/s",
        "measured_per_s": round(measured, 2),
        "simulated_per_s": round(modelled, 2),
        "error_percent": round(100 * (modelled / measured - 1), 1),
    }


def token_bytes(folder: Path) -> float:
    """KV of one token of a model, with keys and values of four bytes."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_key_value_heads"] * config["head_dim"]
    return float(2 * 4 * config["num_hidden_layers"] * heads)


async def run(url: str, seconds: float, seed: int, model: Path) -> list[Row]:
    """Profiles, then all loads."""
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        client = StackClient(session, url, await find_model(url), seed)
        measured = await measure(client)
        profile = make_profile(measured, token_bytes(model), slots=(PREFILL_SLOTS, DECODE_SLOTS))
        assert profile.sharing is not None, "the stack is on one host"
        rate = await sustained(client, SUSTAINED_S, seed)
        sys.stderr.write(f"sustained: {rate:.1f} requests/s; beside each other {profile.sharing}\n")
        rows: list[Row] = [rate_row(rate, simulated_rate(profile, SUSTAINED_S, seed))]
        for number, share in enumerate(LOADS):
            load = arrivals(share * rate, seconds, seed + number)
            sys.stderr.write(f"load {share}: {len(load)} requests in {seconds:g} s\n")
            timings = await send(client, load)
            rows += compare(share, timings, simulated(profile, load))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    url = environment("KVMESH_URL", "http://127.0.0.1:8000")
    parser.add_argument("--url", default=url, help="base URL of the gateway")
    parser.add_argument("--seconds", type=float, default=45.0, help="length of a load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "pydoc-6m")
    parser.add_argument("--out", type=Path, default=RESULTS / "sim_error.json")
    arguments = parser.parse_args(argv)
    rows = asyncio.run(
        run(arguments.url.rstrip("/"), arguments.seconds, arguments.seed, arguments.model)
    )
    result = document(rows, [], arguments.seed, NOTES)
    save(result, arguments.out)
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
