"""What `benchmarks.gateway` measures of one system, phase by phase.

Each phase takes a running system and gives a row; times are in milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gateway_load import Loader, Reply, stream_text
from benchmarks.gateway_systems import NUM_WORKERS, Load, System
from benchmarks.gateway_traffic import (
    PERSON,
    WEATHER,
    Request,
    fresh_chats,
    grown_chats,
    payloads,
)
from benchmarks.result import Row
from kvmesh.core.summary_statistics import percentile

STREAM_TOKENS = 64
SHORT_TOKENS = 16
WARM_UP_S = 0.5
TTFT_LIMIT_MS = 1000
PREFILL_S = 0.04
OVERLOAD_LONGEST_S = 5.0
"""Then a client gives up: it counts as failed."""
CROWD_LIMIT_MS = 5000
CROWD_S = 20.0
CROWD_LONGEST_S = 40.0
"""Long enough to see what is late."""
CAPACITY = NUM_WORKERS / PREFILL_S
"""Prompts per second that the workers can take in the overload phases."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how much.

    Attributes:
        seconds: length of a phase; of those with a given rate, which need more, twice as long.
        streams: at a time when tokens per second are measured.
        rounds: how often all systems take their turn in a phase.
    """

    seconds: float
    streams: int
    seed: int
    rounds: int = 1

    def seed_of(self, turn: int) -> int:
        """Of the chats of a round."""
        return 100 * self.seed + turn


@dataclass(slots=True)
class Bench:
    """One system under load.

    Attributes:
        turn: round of the phase; each has prompts of its own, the same for all systems.
    """

    system: System
    loader: Loader
    plan: Plan
    turn: int = 0

    def chats(self, *requests: Request, grown: bool = False) -> Iterator[bytes]:
        """Requests with this round's chats; several kinds take turns."""
        seed = self.plan.seed_of(self.turn)
        messages = grown_chats(seed) if grown else fresh_chats(seed)
        return payloads(self.system.endpoint, messages, *requests)

    async def settle(self) -> None:
        """Lets go of what still waits in the system, which nobody waits for any more."""
        await self.system.behave()
        fronts = self.system.front
        payload = next(self.chats(Request(1, stream=False)))
        await self.loader.until_ok(payload, lambda: all(each.running for each in fronts))

    def row(self, what: str, **values: object) -> Row:
        """A row of the result."""
        return {"system": self.system.name, "what": what, **values}

    async def measured(
        self, run: Callable[[], Awaitable[list[Reply]]]
    ) -> tuple[list[Reply], float, float, float]:
        """Replies, seconds, and processor seconds of the front and of all but workers."""
        front, everything = self.system.cpu_s()
        started = time.perf_counter()
        replies = await run()
        seconds = time.perf_counter() - started
        front_after, everything_after = self.system.cpu_s()
        return replies, seconds, front_after - front, everything_after - everything


async def requests(
    bench: Bench,
    concurrency: int,
    what: str = "requests",
    extra: Mapping[str, Any] | None = None,
    *,
    grown: bool = False,
) -> Row:
    """Short whole answers, so many at a time.

    Args:
        extra: further fields of the bodies.
        grown: chats go on from turn to turn.
    """
    await bench.system.behave()
    chats = bench.chats(Request(SHORT_TOKENS, stream=False, extra=extra or {}), grown=grown)
    if not grown:
        await bench.loader.closed_loop(chats, concurrency, WARM_UP_S)
    replies, took, front, everything = await bench.measured(
        lambda: bench.loader.closed_loop(chats, concurrency, bench.plan.seconds)
    )
    done = [reply for reply in replies if reply.ok]
    return bench.row(
        f"{what}, {concurrency} in flight",
        **{"per s": round(len(done) / took)},
        **_cpu(len(done), front, everything),
        **_percentiles([reply.duration_s for reply in done]),
        failed=len(replies) - len(done),
    )


async def tokens(bench: Bench, what: str = "tokens") -> Row:
    """Streams one after the other, as many tokens as go through: nothing paces them."""
    await bench.system.behave()
    chats = bench.chats(Request(STREAM_TOKENS, stream=True))
    plan = bench.plan
    await bench.loader.closed_loop(chats, plan.streams, WARM_UP_S)
    replies, took, front, everything = await bench.measured(
        lambda: bench.loader.closed_loop(chats, plan.streams, plan.seconds)
    )
    done = [reply for reply in replies if reply.ok]
    return bench.row(
        f"{what}, {plan.streams} streams",
        **{"per s": round(len(done) * STREAM_TOKENS / took)},
        **_cpu(len(done), front, everything),
        **_percentiles([reply.ttft_s for reply in done]),
        failed=len(replies) - len(done),
        **{"tokens/event": _tokens_per_event(done)},
    )


def _tokens_per_event(streams: Sequence[Reply]) -> float | None:
    num_events = sum(reply.num_events for reply in streams)
    return round(STREAM_TOKENS * len(streams) / num_events, 1) if num_events else None


async def first_token(bench: Bench, rate: float = 50.0) -> Row:
    """Time to first token when workers answer at once."""
    await bench.system.behave(step_s=0.02)
    chats = bench.chats(Request(STREAM_TOKENS, stream=True))
    plan = bench.plan
    await bench.loader.open_loop(chats, rate, WARM_UP_S, seed=plan.seed, longest_s=30)
    replies, took, front, everything = await bench.measured(
        lambda: bench.loader.open_loop(
            chats, rate, 2 * plan.seconds, seed=plan.seed + bench.turn, longest_s=30
        )
    )
    done = [reply for reply in replies if reply.ok]
    return bench.row(
        f"first token, {rate:g} streams/s",
        **{"per s": round(len(done) / took)},
        **_cpu(len(done), front, everything),
        **_percentiles([reply.ttft_s for reply in done]),
        failed=len(replies) - len(done),
    )


async def overload(bench: Bench, factor: int) -> Row:
    """More prompts than the workers can take, each with a limit on its first token."""
    await bench.system.behave(prefill_s=PREFILL_S, slots=1, step_s=0.005)
    chats = bench.chats(Request(8, stream=True, headers=f"x-slo-ttft-ms: {TTFT_LIMIT_MS}\r\n"))
    plan = bench.plan
    seconds = 2 * plan.seconds
    replies, _, front, everything = await bench.measured(
        lambda: bench.loader.open_loop(
            chats, factor * CAPACITY, seconds, seed=plan.seed, longest_s=OVERLOAD_LONGEST_S
        )
    )
    await bench.settle()
    cpu = _cpu(len(replies), front, everything)
    values = _limited(replies, TTFT_LIMIT_MS, seconds, cpu)
    return bench.row(f"overload {factor}x", **values)


async def crowd(bench: Bench, factor: int) -> Row:
    """Overload as many strangers make it: a connection each, and every tenth wants two choices.

    All times are the clients': from before they connect.
    """
    await bench.system.behave(prefill_s=PREFILL_S, slots=1, step_s=0.005)
    headers = f"x-slo-ttft-ms: {CROWD_LIMIT_MS}\r\n"
    one = Request(8, stream=True, headers=headers)
    two = Request(8, stream=True, headers=headers, extra={"n": 2})
    replies, _, front, everything = await bench.measured(
        lambda: bench.loader.open_loop(
            bench.chats(*[one] * 9, two),
            factor * CAPACITY / 1.1,
            CROWD_S,
            seed=bench.plan.seed,
            longest_s=CROWD_LONGEST_S,
            are_alone=True,
        )
    )
    await bench.settle()
    cpu = _cpu(len(replies), front, everything)
    values = _limited(replies, CROWD_LIMIT_MS, CROWD_S, cpu)
    return bench.row(f"crowd {factor}x", **values)


async def killed_worker(bench: Bench, num_streams: int = 24) -> Row:
    """One worker dies under streams: how many of them does a client see break?"""
    await bench.system.behave(step_s=0.02)
    payload = next(bench.chats(Request(STREAM_TOKENS, stream=True)))
    whole, _ = stream_text((await bench.loader.one(payload, keep=True)).body)
    sending = [
        asyncio.ensure_future(bench.loader.one(payload, keep=True)) for _ in range(num_streams)
    ]
    await asyncio.sleep(0.5)  # a third of the way: all stream by now
    bench.system.workers[0].kill()
    replies = await asyncio.gather(*sending)
    intact = [reply for reply in replies if reply.ok and stream_text(reply.body) == (whole, True)]
    return bench.row(
        f"1 of {NUM_WORKERS} workers killed, {num_streams} streams",
        **_percentiles([reply.duration_s for reply in intact]),
        failed=num_streams - len(intact),
    )


@dataclass(frozen=True, slots=True)
class Phase:
    """One thing that is measured of every system.

    Attributes:
        load: what kind it is of.
        main: the number that it is there for; its spread over the rounds is told.
        most_rounds: it is not repeated more often.
        more_rounds: it is repeated so many times as often as others.
    """

    load: Load
    run: Callable[[Bench], Awaitable[Row]]
    main: str = "per s"
    most_rounds: int = 100
    more_rounds: int = 1


TOLD = "with and without telemetry"

_TOLD_ROUNDS = 4
"""Times as many: two systems of which one takes a few percent less, where a round varies by ten."""

TOOLS = {"tools": [WEATHER]}
SCHEMA = {"response_format": PERSON}
SCORES = {"logprobs": True, "top_logprobs": 2}

PHASES = (
    Phase(Load.REQUESTS, lambda bench: requests(bench, 1)),
    Phase(Load.REQUESTS, lambda bench: requests(bench, 32)),
    Phase(Load.GROWN, lambda bench: requests(bench, 32, "turns of chats", grown=True)),
    Phase(Load.FIRST_TOKEN, first_token, "p50 ms"),
    Phase(Load.TOKENS, tokens),
    Phase(Load.FEATURES, lambda bench: requests(bench, 32, "tools", TOOLS)),
    Phase(Load.FEATURES, lambda bench: requests(bench, 32, "JSON schema", SCHEMA)),
    Phase(Load.FEATURES, lambda bench: requests(bench, 32, "log-probabilities", SCORES)),
    Phase(Load.TOLD, lambda bench: requests(bench, 1, TOLD), more_rounds=_TOLD_ROUNDS),
    Phase(Load.TOLD, lambda bench: requests(bench, 32, TOLD), more_rounds=_TOLD_ROUNDS),
    Phase(Load.TOLD, lambda bench: tokens(bench, TOLD), more_rounds=_TOLD_ROUNDS),
    Phase(Load.OVERLOAD, lambda bench: overload(bench, 4), most_rounds=2),
    Phase(Load.OVERLOAD, lambda bench: overload(bench, 7), most_rounds=2),
    Phase(Load.OVERLOAD, lambda bench: crowd(bench, 7), most_rounds=1),
    Phase(Load.KILL, killed_worker, "failed", 1),  # it costs each system a worker
)


def _cpu(count: int, front: float, everything: float) -> Row:
    per_thousand = 1000 / max(count, 1)
    return {
        "front cpu s/1000": round(front * per_thousand, 2),
        "all cpu s/1000": round(everything * per_thousand, 2),
    }


def _limited(replies: Sequence[Reply], limit_ms: float, seconds: float, cpu: Row) -> Row:
    """A row for requests that had a limit on their first token: served, late, refused, failed."""
    done = [reply for reply in replies if reply.ok]
    refused = [reply for reply in replies if reply.status in (429, 503)]
    in_time = [reply for reply in done if reply.ttft_s * 1000 <= limit_ms]
    return {
        "per s": round(len(in_time) / seconds),
        **cpu,
        **_percentiles([reply.ttft_s for reply in done]),
        "failed": len(replies) - len(done) - len(refused),
        "served": len(done),
        "late": len(done) - len(in_time),
        "refused": len(refused),
        "refused p99 ms": _ms([reply.duration_s for reply in refused], 99),
    }


def _percentiles(values: Sequence[float]) -> Row:
    return {"p50 ms": _ms(values, 50), "p99 ms": _ms(values, 99)}


def _ms(values: Sequence[float], percent: float) -> float | None:
    """A percentile in milliseconds; None of no values."""
    return round(1000 * percentile(values, percent), 2) if values else None
