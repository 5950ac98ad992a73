"""Open-loop loads, what a live mesh and the simulator make of them, and the rows of both.

Tests: tests/unit/benchmarks/test_live.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.poisson import poisson_times
from benchmarks.result import Row
from kvmesh.cli.stack_client import VOCAB, StackClient
from kvmesh.core.summary_statistics import percentile
from kvmesh.policy.pdserve import TimeoutTier
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.report import summarize
from kvmesh.sim.scenario import Objectives, Scenario, parse_failures
from kvmesh.sim.simulation import simulate
from kvmesh.sim.steps import ChunkTokens
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest
from tests.mesh_processes import MODEL

CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to count as goodput.

    Attributes:
        ttft_s: it is refused when nobody takes it within this, too.
    """

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load.

    Attributes:
        prefix: number of the beginning that it shares with others; None: it is like no other.
        prefix_tokens: length of that.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    prefix: int | None = None
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """What the client saw of a request, in seconds.

    Attributes:
        outcome: served, refused (an honest no) or error.
        at_s: when it was sent, from the start of the load.
    """

    arrival: Arrival
    outcome: str
    at_s: float
    ttft_s: float = 0.0
    tpot_s: float = 0.0

    def is_good(self, limits: Limits) -> bool:
        """Whether it was served within both limits."""
        in_time = self.ttft_s <= limits.ttft_s and self.tpot_s <= limits.tpot_s
        return self.outcome == "served" and in_time


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a load.

    Attributes:
        median, sigma: of prompt lengths, log-normal.
        longest: longer ones are cut.
    """

    seconds: float
    rate: float
    median: int
    sigma: float
    longest: int
    output_tokens: int


def arrivals(phases: Sequence[Phase], seed: int) -> list[Arrival]:
    """Poisson arrivals; equal arguments give equal loads."""
    draw = random.Random(seed)
    found: list[Arrival] = []
    begin = 0.0
    for phase in phases:
        for at_s in poisson_times(draw, phase.rate, begin, begin + phase.seconds):
            length = phase.median * 2.718281828 ** draw.gauss(0.0, phase.sigma)
            tokens = int(min(max(length, 32), phase.longest))
            found.append(Arrival(at_s, tokens, phase.output_tokens))
        begin += phase.seconds
    return found


def tokens_of(arrival: Arrival, draw: random.Random) -> list[int]:
    """Its prompt: the shared beginning, then tokens of its own."""
    beginning: list[int] = []
    if arrival.prefix is not None:
        shared = random.Random(f"prefix {arrival.prefix}")
        beginning = [shared.randrange(*VOCAB) for _ in range(arrival.prefix_tokens)]
    rest = arrival.input_tokens - len(beginning)
    return beginning + [draw.randrange(*VOCAB) for _ in range(rest)]


async def send(url: str, load: Sequence[Arrival], seed: int) -> list[Seen]:
    """Sends every request when it is due, whatever became of those before.

    Args:
        url: of the gateway.
        seed: of the prompts.
    """
    draw = random.Random(seed)
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = StackClient(session, url, MODEL, seed)
        started = time.perf_counter()

        async def one(arrival: Arrival, prompt: list[int]) -> Seen:
            await asyncio.sleep(started + arrival.at_s - time.perf_counter())
            sent = time.perf_counter() - started
            try:
                timing = await client.complete_prompt(prompt, arrival.output_tokens)
            except (aiohttp.ClientError, TimeoutError, AssertionError):
                return Seen(arrival, "error", sent)
            if timing is None:
                return Seen(arrival, "refused", sent)
            return Seen(arrival, "served", sent, timing.ttft_s, timing.tpot_s)

        return await asyncio.gather(*(one(each, tokens_of(each, draw)) for each in load))


def live_row(system: str, seen: Sequence[Seen], limits: Limits) -> Row:
    """The numbers of a load; times in milliseconds."""
    served = [each for each in seen if each.outcome == "served"]
    span_s = max(each.arrival.at_s for each in seen) - min(each.arrival.at_s for each in seen)
    # Zeros where nobody was served: a row has numbers.
    ttfts = [1e3 * each.ttft_s for each in served] or [0.0]
    tpots = [1e3 * each.tpot_s for each in served] or [0.0]
    good = sum(each.is_good(limits) for each in seen)
    return {
        "system": system,
        "requests": len(seen),
        "refused": sum(each.outcome == "refused" for each in seen),
        "errors": sum(each.outcome == "error" for each in seen),
        "TTFT p50": round(percentile(ttfts, 50)),
        "TTFT p90": round(percentile(ttfts, 90)),
        "TTFT p99": round(percentile(ttfts, 99)),
        "TPOT p50": round(percentile(tpots, 50), 1),
        "TPOT p99": round(percentile(tpots, 99), 1),
        "good": round(good / len(seen), 3),
        "goodput/s": round(good / span_s, 2),
    }


# --- the twin in the simulator -------------------------------------------------------------------


def traced(load: Sequence[Arrival]) -> tuple[TraceRequest, ...]:
    """The same requests for the simulator, whose blocks have 512 tokens."""
    requests: list[TraceRequest] = []
    fresh = 1 << 20
    for each in load:
        blocks = -(-each.input_tokens // TRACE_BLOCK)
        shared = 0 if each.prefix is None else each.prefix_tokens // TRACE_BLOCK
        first = 0 if each.prefix is None else (each.prefix + 1) << 8
        ids = (*range(first, first + shared), *range(fresh, fresh + blocks - shared))
        fresh += blocks
        requests.append(TraceRequest(each.at_s, each.input_tokens, each.output_tokens, ids))
    return tuple(requests)


def simulated(
    policy: str,
    load: Sequence[Arrival],
    profile: Path,
    fleet: str,
    limits: Limits,
    failures: str = "",
) -> Row:
    """What the simulator says of the same load under the same policy.

    Args:
        fleet: as `kvmesh simulate --fleet` takes it.
        failures: as `kvmesh simulate --failures` takes them.
    """
    scenario = Scenario(
        load_profile(str(profile)),
        parse_fleet(fleet),
        dataclasses.replace(SYSTEMS[policy], grouped=False),
        traced(load),
        failures=parse_failures(failures),
        objectives=Objectives((TimeoutTier(1 << 62, limits.ttft_s),), limits.tpot_s),
        chunks=ChunkTokens(CHUNK_TOKENS, CHUNK_TOKENS),
    )
    found = summarize(simulate(scenario))
    return {
        "sim TTFT p50": round(1e3 * found.ttft_p50_s),
        "sim TTFT p90": round(1e3 * found.ttft_p90_s),
        "sim TPOT p50": round(1e3 * found.tpot_p50_s, 1),
        "sim goodput/s": round(found.goodput, 2),
    }


# --- profiles ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceShape:
    """One kind of modelled device.

    Attributes:
        prompt_s: seconds of a prompt: constant, per token, per token squared.
        decode_s: seconds of a decode step: constant, per sequence.
    """

    prompt_s: tuple[float, float, float]
    decode_s: tuple[float, float]
    num_tokens: int = 65_536
    prefill_slots: int = 2
    decode_slots: int = 32


def profile_of(
    devices: Mapping[str, DeviceShape], token_bytes: int, between_bytes_per_s: float
) -> dict[str, Any]:
    """A profile that fake engines and the simulator read alike; the last device is at home."""
    names = list(devices)
    home = devices[names[-1]]
    return {
        "name": "live",
        "description": "Made for the live benchmark.",
        "kv_bytes": {"quadratic": [0, token_bytes, 0]},
        "devices": {
            name: {
                "prefill_s": {"quadratic": list(shape.prompt_s)},
                "decode_s": {
                    "constant": shape.decode_s[0],
                    "per_sequence": shape.decode_s[1],
                    "per_token": 0.0,
                },
                "num_blocks": shape.num_tokens // TRACE_BLOCK,
                "prefill_slots": shape.prefill_slots,
                "decode_slots": shape.decode_slots,
            }
            for name, shape in devices.items()
        },
        "links": {
            "inside_gbps": 4.0,
            "between_gbps": between_bytes_per_s * 8 / 1e9,
            "latency_s": 0.002,
        },
        "plan": {
            "remote": names[0],
            "local": names[-1],
            "num_remote": 1,
            "num_local": 4,
            "decode_batch": home.decode_slots,
            "decode_step_s": home.decode_s[0] + home.decode_s[1] * home.decode_slots,
            "output_tokens": 16,
            "lengths": {"mu": 6.0, "sigma": 1.0, "min": 32, "max": 8192},
        },
    }


def write_profile(path: Path, profile: Mapping[str, Any]) -> Path:
    """Writes it, and gives the path back."""
    path.write_text(json.dumps(profile))
    return path
