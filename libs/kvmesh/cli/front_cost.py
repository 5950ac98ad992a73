"""Measures the CPU time of a running stack outside its engines: per request, token and refusal.

Measured are the front (gateway, scheduler, kvmanager, Redis and the measuring client), the workers'
event loops, which delay their steps, and the share of steps and prompts in which engines compute.

Tests: tests/unit/cli/test_front_cost.py.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass

import psutil

from kvmesh.cli.stack_client import StackClient
from kvmesh.core.cores import usable_cores
from kvmesh.sim.profile import Front, Loop

PREFILL, DECODE, FRONT = "services.prefill", "services.decode", "front"
ENGINES = {PREFILL: "engines of prefill", DECODE: "engines of decode"}
_OFFERS = "kvmesh_gateway_prefill_offers_sum"

LONE_REQUESTS, LONE_TOKENS = 100, 2
STREAMS, STREAM_TOKENS = 4, 512
CROWD_USERS, CROWD_S = 12, 5.0
SHORT_LENGTH, LONG_LENGTH = 4, 512
"""Loads: lone requests, a batch with long answers, and more users than there are slots."""

LEAST_CORES = 0.05
"""Minimum of an engine's cores: one that computes on a device uses hardly any."""


def cpu_s() -> dict[str, float]:
    """Returns the CPU seconds so far of the front, of the workers' loops, and of their engines.

    The front is this process, and all processes of the stack that started it except workers. A
    worker's loop is its main thread, its engine has the other ones.
    """
    total = dict.fromkeys((FRONT, PREFILL, DECODE, *ENGINES.values()), 0.0)
    root = psutil.Process(os.getppid())
    for process in (root, *root.children(recursive=True)):
        try:
            words = process.cmdline()
            role = next((role for role in (PREFILL, DECODE) if role in words), None)
            if role is None:
                times = process.cpu_times()
                total[FRONT] += times.user + times.system
            else:
                for each in process.threads():
                    name = role if each.id == process.pid else ENGINES[role]
                    total[name] += each.user_time + each.system_time
        except psutil.NoSuchProcess:
            continue
    return total


def offers_of(text: str) -> float:
    """Returns the number of a gateway's offers for requests that were placed, from its metrics."""
    lines = (line.split() for line in text.splitlines())
    return sum(float(line[1]) for line in lines if len(line) == 2 and line[0].startswith(_OFFERS))


@dataclass(frozen=True, slots=True)
class Span:
    """Work that the front or a loop did in some time.

    Attributes:
        refusals: number of refused offers.
    """

    seconds: float
    cpu_s: float
    requests: int
    tokens: int
    refusals: float = 0.0

    def beyond(self, idle_cores: float) -> float:
        """Returns the CPU time beyond that of an idle stack."""
        return max(self.cpu_s - idle_cores * self.seconds, 0.0)


def fit_front(
    idle: Span, lone: Span, long: Span, streams: Span, crowd: Span, cores: float
) -> Front:
    """Fits the costs to spans with few tokens, long prompts, many tokens and many refusals.

    Args:
        lone, streams: of prompts of `SHORT_LENGTH` tokens.
        long, crowd: of prompts of `LONG_LENGTH` tokens.
    """
    idle_cores = idle.cpu_s / idle.seconds
    request_s = token_s = prompt_token_s = 0.0
    # Each round brings them closer: a lone request has few tokens, a batch few requests.
    for _ in range(8):
        short_s = (lone.beyond(idle_cores) - token_s * lone.tokens) / lone.requests
        long_s = (long.beyond(idle_cores) - token_s * long.tokens) / long.requests
        prompt_token_s = max((long_s - short_s) / (LONG_LENGTH - SHORT_LENGTH), 0.0)
        request_s = max(short_s - SHORT_LENGTH * prompt_token_s, 0.0)
        rest = streams.beyond(idle_cores) - short_s * streams.requests
        token_s = max(rest / streams.tokens, 0.0)
    rest = crowd.beyond(idle_cores) - token_s * crowd.tokens
    rest -= (request_s + LONG_LENGTH * prompt_token_s) * crowd.requests
    ask_s = max(rest / max(crowd.refusals, 1.0), 0.0)
    return Front(cores, request_s, token_s, ask_s, prompt_token_s, idle_cores)


def fit_loop(prefill: Front, decode: Front, streams: Span) -> Loop:
    """Returns the costs of workers outside their steps, from the costs of their loops.

    A loop's work per step is included in the measured step.

    Args:
        streams: of the decode worker's loop.
    """
    return Loop(
        prefill.request_s,
        decode.request_s,
        prefill.ask_s,
        prefill.prompt_token_s,
        decode.prompt_token_s,
        streams.beyond(decode.idle_cores) / streams.seconds,
    )


def cores_of(cpu_s: float, seconds: float) -> float:
    """Returns the cores that an engine uses in some time; it counts as one thread."""
    return min(max(cpu_s / seconds, LEAST_CORES), 1.0)


@dataclass(frozen=True, slots=True)
class StackCosts:
    """CPU time of a stack.

    Attributes:
        loop: of each worker's event loop.
        step_cores: cores that an engine uses in decode steps.
        prompt_cpu_s: CPU seconds of an engine for a prompt of `LONG_LENGTH` tokens.
    """

    front: Front
    loop: Loop
    step_cores: float
    prompt_cpu_s: float


async def _span(client: StackClient, work: Awaitable[int], tokens: int) -> dict[str, Span]:
    """Measures a piece of work, which returns its number of requests.

    Args:
        tokens: tokens of each request.
    """
    offers, cpu, started = offers_of(await client.metrics()), cpu_s(), time.perf_counter()
    requests = await work
    seconds, after = time.perf_counter() - started, cpu_s()
    refusals = max(offers_of(await client.metrics()) - offers - requests, 0.0)
    return {
        name: Span(seconds, after[name] - cpu[name], requests, requests * tokens, refusals)
        for name in cpu
    }


async def measure_front(client: StackClient) -> StackCosts:
    """Measures the front, the workers' loops and what engines use; takes 30 seconds."""

    async def nothing() -> int:
        await asyncio.sleep(2.0)
        return 0

    async def one_by_one(length: int) -> int:
        for _ in range(LONE_REQUESTS):
            await client.together(1, length, LONE_TOKENS)
        return LONE_REQUESTS

    async def batch() -> int:
        return len(await client.together(STREAMS, SHORT_LENGTH, STREAM_TOKENS))

    async def crowd() -> int:
        end = time.perf_counter() + CROWD_S

        async def user() -> int:
            served = 0
            while time.perf_counter() < end:
                served += len(await client.together(1, LONG_LENGTH, LONE_TOKENS))
            return served

        return sum(await asyncio.gather(*(user() for _ in range(CROWD_USERS))))

    idle = await _span(client, nothing(), 0)
    lone = await _span(client, one_by_one(SHORT_LENGTH), LONE_TOKENS)
    long = await _span(client, one_by_one(LONG_LENGTH), LONE_TOKENS)
    streams = await _span(client, batch(), STREAM_TOKENS)
    crowded = await _span(client, crowd(), LONE_TOKENS)
    cores = float(usable_cores())
    costs = {
        name: fit_front(each, lone[name], long[name], streams[name], crowded[name], cores)
        for name, each in idle.items()
        if name not in ENGINES.values()
    }
    front, loop = costs[FRONT], fit_loop(costs[PREFILL], costs[DECODE], streams[DECODE])
    steps, prompts = streams[ENGINES[DECODE]], long[ENGINES[PREFILL]]
    step_cores = cores_of(steps.cpu_s, steps.seconds)
    sys.stderr.write(
        f"before the workers: {1000 * front.request_s:.2f} ms a request, "
        f"{1e6 * front.prompt_token_s:.1f} us a prompt token, "
        f"{1000 * front.token_s:.3f} ms a token, {1000 * front.ask_s:.2f} ms a refusal\n"
        f"workers beside steps: {1000 * loop.prompt_s:.2f} ms a prompt, "
        f"{1e6 * (loop.prompt_token_s + loop.decode_token_s):.1f} us a prompt token, "
        f"{1000 * loop.decode_s:.2f} ms a decode, {1000 * loop.ask_s:.2f} ms a refusal\n"
        f"a worker in decode steps: {step_cores:.2f} cores, its loop {loop.step_cores:.2f}\n"
    )
    return StackCosts(front, loop, step_cores, prompts.cpu_s / prompts.requests)
