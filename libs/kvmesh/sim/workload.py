"""Synthetic workloads: arrivals, lengths, sessions with growing prompts, shared prefixes.

Tests: tests/unit/sim/test_workload.py.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from kvmesh.core.errors import ConfigError
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest

TICK_S = 3.0
"""Seconds to which published traces round their arrivals."""

BURST_S = 20.0
"""Mean seconds of a burst, and of the calm time after it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Parameters of a synthetic workload.

    Attributes:
        num_requests: number of requests, each turn counted.
        rate: mean arrivals per second.
        lengths: distribution of the new tokens of a prompt.
        burst: factor between the rates of bursts and of calm times; 1 is Poisson.
        output_tokens: mean output length; lengths are geometrically distributed.
        turns: requests of one session; each prompt begins with the one before and its answer.
        think_s: mean seconds between an answer and the next turn.
        shared_tokens: length of the prefixes that several sessions share.
        num_shared: number of these prefixes, the n-th drawn with weight 1/n; 0 for none.
    """

    num_requests: int
    rate: float
    lengths: LengthDistribution
    burst: float = 1.0
    output_tokens: float = 256.0
    turns: int = 1
    think_s: float = 10.0
    shared_tokens: int = 2048
    num_shared: int = 0


def make_requests(workload: Workload, seed: int) -> tuple[TraceRequest, ...]:
    """Returns requests sorted by arrival; equal arguments give equal requests."""
    rng = random.Random(seed)
    fresh = count(1)
    prefix_blocks = workload.shared_tokens // TRACE_BLOCK
    shared = [[next(fresh) for _ in range(prefix_blocks)] for _ in range(workload.num_shared)]
    sessions = -(-workload.num_requests // workload.turns)
    requests: list[TraceRequest] = []
    for index, arrival_s in enumerate(_arrivals(workload, sessions, rng)):
        prefix = _draw(shared, rng)
        num_turns = min(workload.turns, workload.num_requests - index * workload.turns)
        requests += _session(workload, f"s{index}", arrival_s, prefix, num_turns, fresh, rng)
    return tuple(sorted(requests, key=lambda request: request.arrival_s))


def closed_loop(workload: Workload, seed: int) -> tuple[TraceRequest, ...]:
    """Returns the requests of users who each ask `turns` times, without shared prefixes.

    A user's next request arrives `think_s` after the answer in a closed-loop replay. Without pauses
    each user always has one request in flight, as in P/D-Serve 4. The users begin within three
    seconds.
    """
    rng = random.Random(seed)
    fresh = count(1)
    requests: list[TraceRequest] = []
    for index in range(workload.num_requests):
        user, turn = divmod(index, workload.turns)
        tokens = max(int(workload.lengths.quantile(rng.random())), 1)
        output = max(math.ceil(rng.expovariate(1 / workload.output_tokens)), 1)
        ids = tuple(next(fresh) for _ in range(-(-tokens // TRACE_BLOCK)))
        pauses = turn and workload.think_s
        think_s = rng.expovariate(1 / workload.think_s) if pauses else 0.0
        # Turns keep their order among equal arrivals.
        at = 3.0 + turn if turn else 3.0 * rng.random()
        requests.append(TraceRequest(at, tokens, output, ids, f"u{user}", turn, think_s))
    return tuple(sorted(requests, key=lambda request: request.arrival_s))


def _arrivals(workload: Workload, num: int, rng: random.Random) -> Iterator[float]:
    """Yields the start times of sessions: Poisson, or Poisson with two alternating rates."""
    session_rate = workload.rate / workload.turns
    # Both states last equally long, so the mean of these two rates is the wanted rate.
    rates = [2 * session_rate / (1 + workload.burst) * factor for factor in (1, workload.burst)]
    now, state = 0.0, 0
    ends = rng.expovariate(1 / BURST_S)
    for _ in range(num):
        gap = rng.expovariate(1.0)
        # The gap is used up at the rate of each state that it spans.
        while now + gap / rates[state] > ends:
            gap -= (ends - now) * rates[state]
            now, state = ends, 1 - state
            ends += rng.expovariate(1 / BURST_S)
        now += gap / rates[state]
        yield now


def _draw(shared: Sequence[list[int]], rng: random.Random) -> list[int]:
    if not shared:
        return []
    weights = [1 / rank for rank in range(1, len(shared) + 1)]
    return rng.choices(shared, weights)[0]


def _session(
    workload: Workload,
    name: str,
    arrival_s: float,
    prefix: list[int],
    num_turns: int,
    fresh: Iterator[int],
    rng: random.Random,
) -> Iterator[TraceRequest]:
    ids, tokens = list(prefix), len(prefix) * TRACE_BLOCK
    for turn in range(num_turns):
        tokens += max(int(workload.lengths.quantile(rng.random())), 1)
        output = max(math.ceil(rng.expovariate(1 / workload.output_tokens)), 1)
        ids += [next(fresh) for _ in range(tokens // TRACE_BLOCK - len(ids))]
        # The tokens after the last full block are never shared.
        tail = [next(fresh)] if tokens % TRACE_BLOCK else []
        think_s = rng.expovariate(1 / workload.think_s) if turn else 0.0
        arrival_s += think_s
        yield TraceRequest(arrival_s, tokens, output, (*ids, *tail), name, turn, think_s)
        tokens += output


def spread_ticks(requests: Sequence[TraceRequest], seed: int) -> tuple[TraceRequest, ...]:
    """Spreads arrivals that a trace rounded to ticks evenly at random within them."""
    rng = random.Random(seed)
    moved = (
        dataclasses.replace(each, arrival_s=each.arrival_s + rng.random() * TICK_S)
        for each in requests
    )
    return tuple(sorted(moved, key=lambda request: request.arrival_s))


def scale_rate(requests: Sequence[TraceRequest], factor: float) -> tuple[TraceRequest, ...]:
    """Returns the same requests at `factor` times the rate.

    Raises:
        ConfigError: the factor is not positive.
    """
    if factor <= 0:
        raise ConfigError(f"the load factor must be positive, not {factor}")
    return tuple(dataclasses.replace(each, arrival_s=each.arrival_s / factor) for each in requests)
