"""Measures a running stack of one prefill and one decode worker for `kvmesh profile --url`.

All times are the client's. Prompts and decode steps are first measured alone, then together, which
shows the cost of sharing the machine's cores.
Tests: tests/unit/cli/test_stack_costs.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

import aiohttp

from kvmesh.cli.bench_load import find_model
from kvmesh.cli.front_cost import (
    FRONT,
    LONG_LENGTH,
    PREFILL,
    StackCosts,
    cores_of,
    cpu_s,
    measure_front,
)
from kvmesh.cli.stack_client import StackClient, Timing
from kvmesh.core.errors import ConfigError
from kvmesh.policy.curves import Interpolated
from kvmesh.sim.host import crowding
from kvmesh.sim.profile import BITS_PER_GBPS, DecodeCost, Sharing, Work
from kvmesh.sim.trace_request import TRACE_BLOCK

SEED = 1
"""Seed of the prompts."""

TIMEOUT_S = 300.0
"""Timeout of a request, in seconds."""

TINY = 4
LENGTHS = (64, 128, 256, 512, 1024)
ROUNDS, REPEATS = 5, 3
"""Rounds of all measurements, and how often each prompt is measured in a round."""
BATCHES = (1, 4, 8)
LONG_CONTEXT = 768
OUTPUT = 256
MIN_TOKENS = 32
"""Minimum tokens of each sequence while all generate, for a valid measurement of a step."""

TRIES = 15

SHARED_BATCH = 4
SHARED_LENGTH = 512
SHARED_OUTPUT = 640
"""Batch that decodes while prompts of this length come one after the other."""

MIN_PROMPTS = 3

DEVICE = "cpu"
"""Name of the device in the profile."""

PREFILL_SLOTS, DECODE_SLOTS = 1, 32
"""Slots of the workers that `kvmesh up` starts."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """A measured decode step.

    Attributes:
        context: tokens of all sequences of the batch.
    """

    batch: int
    context: float
    step_s: float


def steps_of(timings: Sequence[Timing], input_tokens: int) -> StepSample | None:
    """Returns the step of a batch, from the time in which all of its sequences were generating.

    None: that time is too short.
    """
    begin = max(each.token_s[0] for each in timings)
    end = min(each.token_s[-1] for each in timings)
    counts = [sum(begin < at <= end for at in each.token_s) for each in timings]
    if begin >= end or min(counts) < MIN_TOKENS:
        return None
    context = len(timings) * (input_tokens + len(timings[0].token_s) / 2)
    return StepSample(len(timings), context, (end - begin) / statistics.median(counts))


async def measure_step(client: StackClient, batch: int, input_tokens: int) -> StepSample:
    """Measures the step of a batch of equal sequences.

    Raises:
        RuntimeError: the machine is too busy to have them generate at the same time.
    """
    for _ in range(TRIES):
        found = steps_of(await client.together(batch, input_tokens, OUTPUT), input_tokens)
        if found is not None:
            return found
    raise RuntimeError(f"{batch} sequences did not generate together: the machine is too busy")


def median_step(samples: Sequence[StepSample]) -> StepSample:
    """Returns the median of measurements of one batch."""
    return sorted(samples, key=lambda each: each.step_s)[len(samples) // 2]


def fit_decode(samples: Sequence[StepSample], long: StepSample) -> DecodeCost:
    """Fits a line to steps of short sequences; the excess of long ones is the cost of context.

    Args:
        samples: of short sequences, at least two different batches.
        long: of long sequences.
    """
    batches = [each.batch for each in samples]
    line = statistics.linear_regression(batches, [each.step_s for each in samples])
    slope = max(line.slope, 0.0)
    short_context = statistics.mean(each.context / each.batch for each in samples) * long.batch
    more = long.step_s - (line.intercept + slope * long.batch)
    per_token = max(more / (long.context - short_context), 0.0)
    # The line holds the context of short sequences already.
    per_sequence = max(slope - per_token * short_context / long.batch, 0.0)
    return DecodeCost(max(line.intercept, 1e-5), per_sequence, per_token)


@dataclass(frozen=True, slots=True)
class Beside:
    """Times of prompts and decode steps that run at the same time.

    Attributes:
        first_s: median time to the first token of a prompt of `SHARED_LENGTH` tokens.
        step_s: seconds of a step of `SHARED_BATCH` sequences, with prompts computed all the time.
        front_cores: cores that gateway, scheduler and client used meanwhile.
    """

    first_s: float
    step_s: float
    front_cores: float = 0.0


def beside_of(decoding: Sequence[Timing], prompts: Sequence[Timing]) -> Beside | None:
    """Returns both times, from the time in which all sequences generated and prompts arrived.

    None: that time is too short.
    """
    begin = max(each.token_s[0] for each in decoding)
    end = min(each.token_s[-1] for each in decoding)
    inside = [each for each in prompts if begin < each.sent_s and each.token_s[0] < end]
    if len(inside) < MIN_PROMPTS:
        return None
    begin, end = inside[0].sent_s, inside[-1].token_s[0]
    steps = [sum(begin < at <= end for at in each.token_s) for each in decoding]
    if not min(steps):
        return None
    first_s = statistics.median(each.ttft_s for each in inside)
    return Beside(first_s, (end - begin) / statistics.median(steps))


async def measure_beside(client: StackClient) -> Beside:
    """Measures prompts one after the other beside a batch that generates.

    Raises:
        RuntimeError: the machine is too busy for both at a time.
    """
    for _ in range(TRIES):
        began, cpu = time.perf_counter(), cpu_s()[FRONT]
        decoding = asyncio.create_task(client.together(SHARED_BATCH, TINY, SHARED_OUTPUT))
        prompts: list[Timing] = []
        while not decoding.done():
            prompts += await client.together(1, SHARED_LENGTH, 2)
        found = beside_of(await decoding, prompts)
        if found is not None:
            front_cores = (cpu_s()[FRONT] - cpu) / (time.perf_counter() - began)
            return dataclasses.replace(found, front_cores=front_cores)
    raise RuntimeError("prompts and steps were not at the same time: the machine is too busy")


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements from which the profile is made.

    Attributes:
        first_s: median time to the first token of a lone prompt, by its length.
        handoff_s: from the first token of a lone prompt to its second, by its length.
        beside: the same prompts and steps while both are computed at once.
        spread: relative deviation of the time to the first token of equal prompts.
    """

    first_s: dict[int, float]
    handoff_s: dict[int, float]
    short: tuple[StepSample, ...]
    long: StepSample
    beside: Beside
    costs: StackCosts
    spread: float = 0.0

    @property
    def overhead_s(self) -> float:
        """Seconds in the services: the TTFT of a tiny prompt without its step."""
        return max(self.first_s[TINY] - self.short[0].step_s, 0.0)


@dataclass(slots=True)
class Rounds:
    """Measurements of all rounds: of prompts by length, of steps by batch and length."""

    prompts: dict[int, list[Timing]] = field(default_factory=dict)
    steps: dict[tuple[int, int], list[StepSample]] = field(default_factory=dict)
    beside: list[Beside] = field(default_factory=list)

    async def add(self, client: StackClient) -> None:
        """Makes each measurement once, one at a time."""
        for length in (TINY, *LENGTHS):
            for _ in range(REPEATS):
                self.prompts.setdefault(length, []).extend(await client.together(1, length, 3))
        for batch, length in (*((each, TINY) for each in BATCHES), (BATCHES[1], LONG_CONTEXT)):
            found = await measure_step(client, batch, length)
            self.steps.setdefault((batch, length), []).append(found)
        self.beside.append(await measure_beside(client))

    def first_s(self, length: int) -> float:
        """Median seconds to the first token of a prompt."""
        return statistics.median(each.ttft_s for each in self.prompts[length])

    def handoff_s(self, length: int) -> float:
        """Median seconds from the first token of a prompt to the second one."""
        times = self.prompts[length]
        return statistics.median(each.token_s[1] - each.token_s[0] for each in times)

    @property
    def spread(self) -> float:
        """See `Measured`."""
        times = self.prompts.values()
        return statistics.median(spread_of([each.ttft_s for each in equal]) for equal in times)

    @property
    def median_beside(self) -> Beside:
        """Median of each part."""
        parts = zip(*map(astuple, self.beside), strict=True)
        return Beside(*map(statistics.median, parts))


async def measure(client: StackClient) -> Measured:
    """Makes all measurements, in rounds since the machine may be slower for a while; takes about
    two minutes.
    """
    await client.together(2, LENGTHS[-1], 8)  # warm
    rounds = Rounds()
    for number in range(ROUNDS):
        sys.stderr.write(f"round {number + 1} of {ROUNDS}\n")
        await rounds.add(client)
    first = {length: rounds.first_s(length) for length in rounds.prompts}
    handoff = {length: rounds.handoff_s(length) for length in rounds.prompts}
    for length, seconds in first.items():
        sys.stderr.write(f"prompt of {length}: first token after {1000 * seconds:.1f} ms\n")
    steps = [median_step(each) for each in rounds.steps.values()]
    for step in steps:
        sys.stderr.write(
            f"batch of {step.batch} with {step.context:.0f} tokens: "
            f"a step takes {1000 * step.step_s:.2f} ms\n"
        )
    beside = rounds.median_beside
    sys.stderr.write(
        f"beside each other: a prompt of {SHARED_LENGTH} {1000 * beside.first_s:.1f} ms, "
        f"a step of {SHARED_BATCH} {1000 * beside.step_s:.2f} ms\n"
    )
    costs = await measure_front(client)
    short, long = tuple(steps[:-1]), steps[-1]
    return Measured(first, handoff, short, long, beside, costs, rounds.spread)


def spread_of(times_s: Sequence[float]) -> float:
    """Returns the relative deviation of equal runs; a single late one counts for little."""
    median = statistics.median(times_s)
    # For a normal distribution the deviation is 1.48 times the median distance.
    return 1.48 * statistics.median(abs(each - median) for each in times_s) / median


async def measure_stack(url: str) -> Measured:
    """Measures the stack behind a gateway.

    Raises:
        ConfigError: its workers are not found.
        RuntimeError: the machine is too busy.
    """
    if not cpu_s()[PREFILL]:
        raise ConfigError(
            "the stack's workers do not run below the process that started this one; measure it "
            "with kvmesh up --prefill 1 --decode 1 --threads 1 --run 'kvmesh profile --model DIR'"
        )
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        return await measure(StackClient(session, url, await find_model(url), SEED))


def stack_record(
    measured: Measured, model: str, kv_bytes: Sequence[tuple[int, int]], blocks: int
) -> dict[str, Any]:
    """Returns the profile of the stack's workers as JSON values.

    Args:
        kv_bytes: pairs of tokens and bytes that a handoff moves.
        blocks: number of positions that a worker's KV blocks hold.
    """
    overhead = measured.overhead_s
    points = [(0.0, 0.0)]
    for length in (TINY, *LENGTHS):
        # Never decreasing, despite measurement noise.
        points.append((float(length), max(measured.first_s[length] - overhead, points[-1][1])))
    decode = fit_decode(measured.short, measured.long)
    length = LENGTHS[-1]
    sending_s = max(measured.handoff_s[length] - decode.step_s(1, length), 1e-4)
    moved = Interpolated(tuple((float(tokens), float(size)) for tokens, size in kv_bytes))
    gbps = moved(length) / sending_s * 8 / BITS_PER_GBPS
    return {
        "name": model,
        "description": f"{model} in a running stack, measured by kvmesh profile --url.",
        "kv_bytes": {"points": [list(each) for each in kv_bytes]},
        "devices": {
            DEVICE: {
                "prefill_s": {"points": [list(each) for each in points]},
                "decode_s": asdict(decode),
                "num_blocks": max(blocks // TRACE_BLOCK, 1),
                "prefill_slots": PREFILL_SLOTS,
                "decode_slots": DECODE_SLOTS,
                "spread": measured.spread,
            }
        },
        # Three control messages precede the first token.
        "links": {"inside_gbps": gbps, "between_gbps": gbps, "latency_s": overhead / 3},
        "plan": {
            "remote": DEVICE,
            "local": DEVICE,
            "num_remote": 0,
            "num_local": 2,
            "decode_batch": BATCHES[-1],
            "decode_step_s": decode.step_s(BATCHES[-1], BATCHES[-1] * OUTPUT),
            "output_tokens": 128,
            "lengths": {
                "mu": math.log(LENGTHS[0] * LENGTHS[-1]) / 2,
                "sigma": 1.0,
                "min": LENGTHS[0],
                "max": LENGTHS[-1],
            },
        },
        "sharing": asdict(_sharing(measured, decode, Interpolated(tuple(points)))),
        "measured": asdict(measured),
    }


def _sharing(measured: Measured, decode: DecodeCost, prefill: Interpolated) -> Sharing:
    beside = measured.beside
    alone_s = decode.step_s(SHARED_BATCH, SHARED_BATCH * (TINY + SHARED_OUTPUT / 2))
    costs = measured.costs
    prompt_cores = cores_of(costs.prompt_cpu_s, prefill(LONG_LENGTH))
    alone = Sharing(1.0, 1.0, costs.front, costs.loop, costs.step_cores, prompt_cores)
    # The front's use of the cores slowed both measurements; it is not part of their costs.
    crowded = crowding(1, 1, beside.front_cores, alone)
    first_s = (beside.first_s - measured.overhead_s) / crowded[Work.PROMPT]
    return dataclasses.replace(
        alone,
        prefill=max(first_s / prefill(SHARED_LENGTH), 1.0),
        decode=max(beside.step_s / crowded[Work.STEPS] / alone_s, 1.0),
    )
