"""Copies of hot prefixes, live: how evenly workers' caches are read, and how long reads take.

    python -m benchmarks.pool

All five services in this process, with the deterministic engine: steps take a fixed time, KV moves
for real. Prefixes have a skewed popularity, and the same load is sent without and with copies: once
as reads of who holds a prefix, once as requests that are routed.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import logging
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import aiohttp

from benchmarks.poisson import poisson_times
from benchmarks.pool_mesh import (
    BLOCK_SIZE,
    COPIES,
    HASHED,
    MODEL,
    NO_COPIES,
    START_POLLS,
    WORKERS,
    PoolMesh,
    pool_mesh,
)
from benchmarks.result import RESULTS, Row, Target, document, markdown, save
from kvmesh.cli.stack_client import StackClient
from kvmesh.core.summary_statistics import coefficient_of_variation, percentile
from kvmesh.core.types import BlockHash, PrefixSource, WorkerId
from kvmesh.kv.hashing import chain_hashes, root_hash
from kvmesh.policy.replication import choose_copy
from kvmesh.policy.segment_tree import Segment
from kvmesh.rpc.prefix_lookup import PrefixLookup
from kvmesh.runtime.fetch_result import FetchOutcome
from kvmesh.runtime.worker import Worker
from services.kvmanager import metrics
from services.kvmanager.config import PoolConfig

PREFIXES, PREFIX_TOKENS, TAIL_TOKENS, OUTPUT_TOKENS = 12, 2048, 32, 4
SKEW = 2.0
"""Exponent of the popularity of prefixes (Zipf)."""

WARM_UP = 0.4
"""Part of a run before reads count: some plans have to be made and carried out."""

FADED = 0.98
"""What a reader's view of loads keeps from one read to the next."""

LOOKUP_TIMEOUT_S = 5.0

SEGMENT_BLOCKS = 4, 64, 153
"""Other lengths than the default for which reads are counted. The last is TokenLake 4.2's for this
kind of machine: a question is on its way for 0.55 ms, and a token's attention takes 0.224 us
(bench/results/queries.md, shm, 1 new token), that is 2,450 tokens."""

CV_GOAL = 0.3
"""Of the unevenness of reads with copies, over that without."""

CHANCE_GOAL = 2.0
"""As `CV_GOAL`, over what chance alone makes of so many reads."""

EVEN_GOAL = 0.11
"""Of the unevenness itself with copies, of reads of holders and of routed requests."""

NOTES = """\
CV: of the cached blocks that each of four workers read in the last three fifths of a run
- chance: what the CV would be if every read fell on any worker alike
- holders: a fifth worker looks each prefix up, takes the less loaded of two holders, and fetches it
 by GET, one read after the other; times are from when a read was due to its end
- hashed homes: every prefix that is read is copied to the worker that its hash names too
 (`pool.placement`)
- counted by: blocks per segment, `pool.segment_blocks`, 16 elsewhere; prefixes have 128
- routed: requests through the gateway under the default policy, prefill and decode apart; times are
 of first tokens. A busy holder's prefix is soon computed or fetched elsewhere on a request's time,
 and of several that are alike the worker whose cache was read less of late is taken, so that reads
 are more even than chance would make them
- steps of the engine take a fixed time whatever else the machine does; the services, the transfers
 and the load share the cores""".replace("\n ", " ").split("\n- ")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load."""

    at_s: float
    prompt: tuple[int, ...]

    @property
    def prefix(self) -> tuple[int, ...]:
        """What it shares with others."""
        return self.prompt[:PREFIX_TOKENS]


def arrivals(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Poisson arrivals of prompts with popular beginnings."""
    draw = random.Random(seed)
    token = partial(draw.randrange, 16, 4000)
    prefixes = [tuple(token() for _ in range(PREFIX_TOKENS)) for _ in range(PREFIXES)]
    shares = list(itertools.accumulate((rank + 1) ** -SKEW for rank in range(PREFIXES)))
    found: list[Arrival] = []
    for at_s in poisson_times(draw, rate, 0.0, seconds):
        chosen = prefixes[bisect.bisect(shares, draw.random() * shares[-1])]
        found.append(Arrival(at_s, chosen + tuple(token() for _ in range(TAIL_TOKENS))))
    return found


Send = Callable[[Arrival], Awaitable[bool]]
"""Sends one request; False if it was refused."""


class HolderReads:
    """Reads of prefixes where they are, as remote attention and fetches do."""

    def __init__(self, mesh: PoolMesh, lookup: PrefixLookup, seed: int) -> None:
        self._lookup = lookup
        self._workers = {each.worker_id: each for each in mesh.workers[:WORKERS]}
        self._reader = mesh.workers[WORKERS]
        self._namespace = self._reader.core.spec.layout.model_fingerprint
        self._loads = dict.fromkeys(self._workers, 0.0)
        self._rng = random.Random(seed)
        # Reads at once of one prefix by one worker would be one read.
        self._turn = asyncio.Lock()

    def hashes(self, prefix: Sequence[int]) -> list[BlockHash]:
        """Names of a prefix's blocks."""
        return chain_hashes(root_hash(self._namespace), prefix, BLOCK_SIZE)

    async def place(self, prefixes: Sequence[Sequence[int]]) -> None:
        """Puts one copy of each prefix into the pool, on one worker after the other."""
        for prefix, worker in zip(prefixes, itertools.cycle(self._workers.values())):
            pool = worker.core.pool
            hashes = self.hashes(prefix)
            blocks = pool.allocate(len(hashes))
            for block, name in zip(blocks, hashes, strict=True):
                pool.seal(block, name)
            pool.release(blocks)
        for prefix in prefixes:
            for _ in range(START_POLLS):
                if await self._holders(self.hashes(prefix)):
                    break
                await asyncio.sleep(0.05)

    async def _holders(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, float]:
        answer = await self._lookup.match(self._namespace, hashes, LOOKUP_TIMEOUT_S)
        return {each.worker_id: 0.0 for each in answer.matches if each.num_blocks == len(hashes)}

    async def read(self, arrival: Arrival) -> bool:
        """One read."""
        async with self._turn:
            return await self._read(arrival)

    async def _read(self, arrival: Arrival) -> bool:
        hashes = self.hashes(arrival.prefix)
        copies = await self._holders(hashes)
        holder = choose_copy(Segment(hashes[-1], None, copies=copies), self._loads, self._rng)
        if holder is None:
            return False
        self._loads = {worker: load * FADED for worker, load in self._loads.items()}
        self._loads[holder] += 1
        worker, reader = self._workers[holder], self._reader
        reader.core.pool.clear_cached()
        endpoint = worker.copies.report().endpoint
        source = PrefixSource(WorkerId(holder), worker.incarnation, endpoint, len(hashes))
        return (await reader.fetcher.fetch(source, hashes)).outcome is FetchOutcome.FETCHED


def num_reads(worker: Worker) -> int:
    """Cached blocks that were read there."""
    return worker.copies.report().read_blocks_total


async def send_all(name: str, mesh: PoolMesh, load: Sequence[Arrival], send: Send) -> Row:
    """Sends every request when it is due, and measures."""
    done = metrics.POOL_COPIES.labels("done", "fetched")._value
    copies_before = done.get()
    times: list[float] = []
    started = time.perf_counter()
    warm = started + load[-1].at_s * WARM_UP

    async def one(arrival: Arrival) -> bool:
        await asyncio.sleep(started + arrival.at_s - time.perf_counter())
        sent = time.perf_counter()
        was_served = await send(arrival)
        if was_served and sent > warm:
            times.append(time.perf_counter() - sent)
        return was_served

    async def reads_when_warm() -> list[int]:
        await asyncio.sleep(warm - time.perf_counter())
        return [num_reads(each) for each in readers]

    readers = mesh.workers[:WORKERS]
    served, before = await asyncio.gather(
        asyncio.gather(*map(one, load)), asyncio.create_task(reads_when_warm())
    )
    reads = [float(num_reads(each) - was) for each, was in zip(readers, before, strict=True)]
    num_later = sum(arrival.at_s > load[-1].at_s * WARM_UP for arrival in load)
    return {
        "reads": name,
        "cv": round(coefficient_of_variation(reads), 3),
        "chance": round(((WORKERS - 1) / num_later) ** 0.5, 3),
        "p50 ms": round(1e3 * percentile(times, 50), 1),
        "p90 ms": round(1e3 * percentile(times, 90), 1),
        "p99 ms": round(1e3 * percentile(times, 99), 1),
        "refused": served.count(False),
        "copied prefixes": int(done.get() - copies_before),
    }


async def run_holders(name: str, pool: PoolConfig, load: Sequence[Arrival]) -> Row:
    """Reads of whoever holds the prefix."""
    async with pool_mesh(pool) as mesh:
        lookup = PrefixLookup(mesh.kvmanager)
        task = asyncio.create_task(lookup.run())
        reads = HolderReads(mesh, lookup, seed=0)
        await reads.place(list(dict.fromkeys(each.prefix for each in load)))
        row = await send_all(name, mesh, load, reads.read)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return row


async def run_routed(name: str, pool: PoolConfig, load: Sequence[Arrival]) -> Row:
    """Requests through the gateway."""
    async with pool_mesh(pool) as mesh, aiohttp.ClientSession() as session:
        client = StackClient(session, mesh.url, MODEL.name, seed=0)

        async def send(arrival: Arrival) -> bool:
            prompt = arrival.prompt
            return await client.complete_prompt(prompt, OUTPUT_TOKENS, "disaggregated") is not None

        return await send_all(name, mesh, load, send)


async def measure(rate: float, routed_rate: float, seconds: float, seed: int) -> list[Row]:
    """Everything, one after the other; without and with copies under the same load."""
    rows: list[Row] = []
    lengths = {
        f"copies, counted by {blocks} blocks": replace(COPIES, segment_blocks=blocks)
        for blocks in SEGMENT_BLOCKS
    }
    forms = {"no copies": NO_COPIES, "copies": COPIES, "hashed homes and copies": HASHED}
    for name, run, per_s, pools in (
        ("holders", run_holders, rate, forms | lengths),
        ("routed", run_routed, routed_rate, forms),
    ):
        load = arrivals(per_s, seconds, seed)
        for copies, pool in pools.items():
            sys.stderr.write(f"{name}, {copies}: {len(load)} reads in {seconds:g} s\n")
            rows.append(await run(f"{name}, {copies}", pool, load))
    return rows


def targets(rows: Sequence[Row]) -> list[Target]:
    """Of reads of holders, and of routed requests where the hot prefixes have copies."""
    without, copied = rows[:2]
    routed = next(row for row in rows if row["reads"] == "routed, copies")
    return [
        Target(
            "CV of reads of holders, copies / no copies",
            copied["cv"] / without["cv"],
            CV_GOAL,
            at_most=True,
        ),
        Target(
            "CV of reads of holders, copies / chance",
            copied["cv"] / copied["chance"],
            CHANCE_GOAL,
            at_most=True,
        ),
        Target("CV of reads of holders, copies", copied["cv"], EVEN_GOAL, at_most=True),
        Target("CV of routed requests, copies", routed["cv"], EVEN_GOAL, at_most=True),
    ]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=25.0, help="reads of holders per second")
    parser.add_argument("--routed-rate", type=float, default=8.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)  # each run ends with workers that are lost
    rows = asyncio.run(measure(chosen.rate, chosen.routed_rate, chosen.seconds, chosen.seed))
    result = document(rows, targets(rows), chosen.seed, NOTES)
    if not chosen.dry:
        save(result, RESULTS / "pool.json")
    sys.stdout.write(markdown(result))


if __name__ == "__main__":
    main()
