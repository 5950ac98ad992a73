"""Copies of hot prefixes, live: how evenly workers' caches are read, and what first tokens take.

    python -m benchmarks.pool

All five services in this process, with the deterministic engine: steps take a fixed time, KV moves
for real. Prompts share prefixes whose popularity is skewed; the same requests are sent without and
with copies.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import aiohttp
from prometheus_client import CollectorRegistry

from benchmarks.result import RESULTS, ROOT, Row, Target, document, markdown, save
from benchmarks.stack_client import StackClient, Timing
from kvmesh.cli.bench_metrics import percentile
from kvmesh.runtime.app import ServerConfig, ServiceContext, serving
from kvmesh.runtime.worker import Worker, build_worker
from kvmesh.runtime.worker_config import EngineSection, WorkerConfig, WorkerSection
from kvmesh.runtime.worker_metrics import WorkerMetrics
from kvmesh.sim.report import coefficient_of_variation
from services.gateway.config import GatewayConfig, HttpConfig, ModelConfig
from services.gateway.config import SchedulerConfig as SchedulerTargets
from services.gateway.service import Gateway, start_gateway
from services.kvmanager import metrics
from services.kvmanager.config import IndexConfig, KvManagerConfig, PoolConfig
from services.kvmanager.service import build as build_kvmanager
from services.scheduler.config import KvManagerConfig as KvManagerTarget
from services.scheduler.config import PlanningConfig, RoutingConfig, SchedulerConfig
from services.scheduler.service import build as build_scheduler

MODEL = ROOT / "models" / "pydoc-6m"
BLOCK_SIZE = 16
NUM_BLOCKS = 4096
WORKERS = 4
"""That run prompts; one more generates."""

PREFIXES, PREFIX_TOKENS, TAIL_TOKENS, OUTPUT_TOKENS = 12, 2048, 32, 4
SKEW = 2.0
"""Exponent of the popularity of prefixes (Zipf)."""

STEP_S, STEP_TOKENS = 0.01, 128
WINDOW_S = 2.0
"""Of the kvmanager's plans."""

READ_WINDOW_S = 8.0
"""Reads are compared over windows of this length."""

POLICIES = ("cache_centric", "kvmesh")
"""One that follows prefixes and never computes one again to share the work, and the default."""
START_POLLS = 400
"""Looks for connected workers, every 50 ms."""

WARM_UP = 1 / 3
"""Part of a run before reads and first tokens count."""

CV_GOAL = 0.7
"""Of the unevenness of reads with copies, over that without."""

NOTES = """\
CV: of the cached blocks that each of four workers read in eight seconds; mean of the windows after
 the first third of a run
- chance: what the CV would be if every request read any worker alike
- under the default policy a busy holder's prefix is soon computed again elsewhere: reads are as
 even as chance allows without copies
- steps of the engine take a fixed time whatever else the machine does; the services, the transfers
 and the load share the cores""".replace("\n ", " ").split("\n- ")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load."""

    at_s: float
    prompt: tuple[int, ...]


def arrivals(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Poisson arrivals of prompts with popular beginnings."""
    draw = random.Random(seed)
    token = partial(draw.randrange, 16, 4000)
    prefixes = [tuple(token() for _ in range(PREFIX_TOKENS)) for _ in range(PREFIXES)]
    shares = list(itertools.accumulate((rank + 1) ** -SKEW for rank in range(PREFIXES)))
    found: list[Arrival] = []
    at_s = draw.expovariate(rate)
    while at_s < seconds:
        chosen = prefixes[bisect.bisect(shares, draw.random() * shares[-1])]
        found.append(Arrival(at_s, chosen + tuple(token() for _ in range(TAIL_TOKENS))))
        at_s += draw.expovariate(rate)
    return found


@asynccontextmanager
async def mesh(policy: str, budget_mb_s: float) -> AsyncIterator[tuple[str, list[Worker]]]:
    """The services and their workers; yields the gateway's address too."""
    server = ServerConfig(port=0)
    pool = PoolConfig(budget_mb_s=budget_mb_s, window_s=WINDOW_S)
    async with AsyncExitStack() as stack:
        kvmanager = await stack.enter_async_context(
            serving(
                "kvmanager",
                KvManagerConfig(server=server, index=IndexConfig(store="memory"), pool=pool),
                build_kvmanager,
            )
        )
        target = f"127.0.0.1:{kvmanager.port}"
        config = SchedulerConfig(
            server=server,
            routing=RoutingConfig(policy=policy),
            planning=PlanningConfig(roles="off"),
            kvmanager=KvManagerTarget(target=target),
        )
        scheduler = await stack.enter_async_context(serving("scheduler", config, build_scheduler))
        targets = f"127.0.0.1:{scheduler.port}"
        made: list[Worker] = []
        for number in range(WORKERS + 1):
            section = WorkerSection(
                id=f"w{number}",
                role="prefill" if number < WORKERS else "decode",
                prefill_slots=8,
                scheduler_targets=targets,
                kvmanager_target=target,
            )
            await stack.enter_async_context(_worker(section, made))
        gateways: list[Gateway] = []

        async def build_gateway(config: GatewayConfig, context: ServiceContext) -> None:
            gateways.append(await start_gateway(config, context))

        front = GatewayConfig(
            server=server,
            http=HttpConfig(port=0),
            model=ModelConfig(path=str(MODEL)),
            scheduler=SchedulerTargets(targets=targets),
        )
        await stack.enter_async_context(serving("gateway", front, build_gateway))
        for _ in range(START_POLLS):
            if gateways[0].sessions.num_connected > WORKERS:
                break
            await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{gateways[0].http_port}", made[:WORKERS]


@asynccontextmanager
async def _worker(section: WorkerSection, made: list[Worker]) -> AsyncIterator[None]:
    engine = EngineSection(
        kind="fake",
        model=str(MODEL),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_batch_tokens=STEP_TOKENS,
        fake_step_s=STEP_S,
    )
    config = replace(WorkerConfig(), worker=section, engine=engine, server=ServerConfig(port=0))

    async def build(config: WorkerConfig, context: ServiceContext) -> None:
        made.append(await build_worker(config, context, WorkerMetrics(CollectorRegistry())))

    async with serving("worker", config, build):
        yield


async def read_cvs(workers: Sequence[Worker], cvs: list[tuple[float, float]]) -> None:
    """Notes the time and the CV of each window, until cancelled."""
    before = [each.core.statistics().cached_tokens_total for each in workers]
    while True:
        await asyncio.sleep(READ_WINDOW_S)
        now = [each.core.statistics().cached_tokens_total for each in workers]
        reads = [float(later - earlier) for later, earlier in zip(now, before, strict=True)]
        cvs.append((time.perf_counter(), coefficient_of_variation(reads)))
        before = now


async def run(policy: str, budget_mb_s: float, load: Sequence[Arrival]) -> Row:
    """Sends a load to a fresh mesh and measures."""
    done = metrics.POOL_COPIES.labels("done", "fetched")._value
    copies_before = done.get()
    cvs: list[tuple[float, float]] = []
    async with mesh(policy, budget_mb_s) as (url, workers), aiohttp.ClientSession() as session:
        client = StackClient(session, url, MODEL.name, seed=0)
        started = time.perf_counter()

        async def one(arrival: Arrival) -> Timing | None:
            await asyncio.sleep(started + arrival.at_s - time.perf_counter())
            return await client.complete_prompt(arrival.prompt, OUTPUT_TOKENS, "disaggregated")

        watch = asyncio.create_task(read_cvs(workers, cvs))
        found = await asyncio.gather(*map(one, load))
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        totals = [each.core.statistics() for each in workers]
    warm = started + load[-1].at_s * WARM_UP
    later = [cv for at, cv in cvs if at > warm + READ_WINDOW_S]
    times = [each.ttft_s for each in found if each is not None and each.sent_s > warm]
    per_window = len(load) / load[-1].at_s * READ_WINDOW_S
    hits = sum(each.cached_tokens_total for each in totals)
    return {
        "policy": policy,
        "copies": "yes" if budget_mb_s else "no",
        "cv of reads": round(sum(later) / len(later), 3),
        "chance": round(((WORKERS - 1) / per_window) ** 0.5, 3),
        "ttft p50 ms": round(1e3 * percentile(times, 50), 1),
        "ttft p90 ms": round(1e3 * percentile(times, 90), 1),
        "ttft p99 ms": round(1e3 * percentile(times, 99), 1),
        "refused": sum(each is None for each in found),
        "cached share": round(hits / sum(each.prompt_tokens_total for each in totals), 3),
        "copied prefixes": int(done.get() - copies_before),
    }


async def measure(rate: float, seconds: float, seed: int) -> list[Row]:
    """All systems, one after the other, under the same load."""
    load = arrivals(rate, seconds, seed)
    rows: list[Row] = []
    for policy, budget_mb_s in itertools.product(POLICIES, (0.0, 100.0)):
        sys.stderr.write(f"{policy}, {budget_mb_s:g} MB/s: {len(load)} requests\n")
        rows.append(await run(policy, budget_mb_s, load))
    return rows


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=40.0, help="length of a run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    chosen = parser.parse_args()
    rows = asyncio.run(measure(chosen.rate, chosen.seconds, chosen.seed))
    ratio = rows[1]["cv of reads"] / rows[0]["cv of reads"]
    goal = Target(
        f"CV of reads under {POLICIES[0]}, copies / no copies", ratio, CV_GOAL, at_most=True
    )
    result = document(rows, [goal], chosen.seed, NOTES)
    if chosen.dry:
        sys.stdout.write(markdown(result))
        return
    save(result, RESULTS / "pool.json")
    sys.stdout.write(f"{RESULTS / 'pool.md'}\n")


if __name__ == "__main__":
    main()
