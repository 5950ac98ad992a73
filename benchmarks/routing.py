"""What a route decision costs a scheduler, by the size of its fleet.

    python -m benchmarks.routing

The parts of the service without its streams: fleet, router with prefix matches at hand, decision
log. Workers report between decisions, as they do all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.result import RESULTS, Row, Target, document, markdown, save
from kvmesh.core.clock import ManualClock
from kvmesh.core.slots import PrefixMatch
from kvmesh.core.summary_statistics import percentile
from kvmesh.core.types import (
    BlockHash,
    Endpoint,
    KvLayout,
    Placement,
    Refusal,
    RequestId,
    Role,
    RouteQuery,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)
from kvmesh.policy.composition import COMPOSITIONS, DEFAULT
from services.scheduler.config import PlanningConfig
from services.scheduler.decisions import DecisionLog
from services.scheduler.fleet import Fleet, Membership
from services.scheduler.planner import Planner
from services.scheduler.role_orders import RoleChanges
from services.scheduler.router import Router, RouterSettings

SIZES = (100, 1_000, 10_000)
REPORTS_PER_ROUTE = 4
HOLDERS = 50
"""Workers that hold a prefix of a prompt."""

LAYOUT = KvLayout("bench", "bfloat16", 16, 32, 8, 128)
PLACE = Endpoint("127.0.0.1", 1)
HASHES = (BlockHash(bytes(16)),)
NUM_BLOCKS = 10_000

NOTES = (
    "times are of the thread's CPU: nothing in a decision waits",
    "decide: one decision, prefix matches at hand, its span and log entry included",
    "report: one load report of a worker, which keeps the fleet in order",
    "cycle: threshold and role loop over all workers, once a second, for the most part in a thread",
)


@dataclass(frozen=True, slots=True)
class Held:
    """A `PrefixMatcher` that knows at once."""

    matches: Sequence[PrefixMatch]
    known: bool = True
    why: str = ""

    async def match(self, namespace: str, hashes: Sequence[BlockHash], timeout_s: float) -> Held:
        """The same holders for every prompt."""
        return self


class Bench:
    """A fleet of one size."""

    def __init__(self, num_workers: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.clock = ManualClock()
        self.fleet = Fleet(1e9)
        self.members = [self._join(number) for number in range(num_workers)]
        holders = self.draw.sample(self.members, HOLDERS)
        held = [
            PrefixMatch(each.worker_id, 1, "home", 1 + number % 100)
            for number, each in enumerate(holders)
        ]
        policy, decisions = COMPOSITIONS[DEFAULT], DecisionLog(self.clock, 1000)
        changes = RoleChanges.RECOMMEND
        self.planner = Planner(
            self.fleet, policy, PlanningConfig(), decisions, self.clock, changes=changes
        )
        settings = RouterSettings(policy, Placement.AUTO, 1.0)
        self.router = Router(self.fleet, settings, Held(held), self.clock, decisions, self.planner)

    def _join(self, number: int) -> Membership:
        info = WorkerInfo(
            WorkerId(f"worker-{number:05}"),
            1,
            Role.DECODE if number % 2 else Role.PREFILL,
            "home",
            PLACE,
            PLACE,
            "bench",
            LAYOUT,
            NUM_BLOCKS * LAYOUT.block_size,
            4,
            64,
            NUM_BLOCKS,
        )
        joined = self.fleet.register(info, 0.0)
        assert isinstance(joined, Membership)
        return joined

    def report(self, member: Membership) -> None:
        """A worker tells a load."""
        draw = self.draw
        load = WorkerLoad(
            prefill_active=draw.randrange(5),
            decode_running=draw.randrange(65),
            blocks_free=draw.randrange(NUM_BLOCKS),
            pending_tokens=draw.randrange(8192),
        )
        assert self.fleet.report(member, load, self.clock.now())

    async def route(self, number: int) -> None:
        """One decision."""
        query = RouteQuery(
            RequestId(f"request-{number}"), "bench", self.draw.randrange(64, 8192), 256, HASHES
        )
        assert not isinstance(await self.router.route(query, "", "gateway"), Refusal)


async def measure(num_workers: int, num_routes: int, seed: int) -> Row:
    """Times of one size, in microseconds."""
    bench = Bench(num_workers, seed)
    for member in bench.members:
        bench.report(member)
    decide: list[float] = []
    report: list[float] = []
    for number in range(num_routes):
        bench.clock.advance(0.001)
        for member in bench.draw.sample(bench.members, REPORTS_PER_ROUTE):
            started = time.thread_time()
            bench.report(member)
            report.append(1e6 * (time.thread_time() - started))
        started = time.thread_time()
        await bench.route(number)
        decide.append(1e6 * (time.thread_time() - started))
    started = time.process_time()
    await bench.planner.cycle(may_order=False)
    cycle_s = time.process_time() - started
    return {
        "workers": num_workers,
        "routes": num_routes,
        "decide_p50_us": round(percentile(decide, 50), 1),
        "decide_p99_us": round(percentile(decide, 99), 1),
        "report_p50_us": round(percentile(report, 50), 1),
        "report_p99_us": round(percentile(report, 99), 1),
        "cycle_ms": round(1000 * cycle_s, 2),
    }


def targets_of(rows: Sequence[Row]) -> list[Target]:
    """A decision under 1 ms at 1,000 workers and under 5 ms at 10,000, 99 times of 100."""
    p99 = {row["workers"]: row["decide_p99_us"] / 1000 for row in rows}
    return [
        Target("decide_p99_ms at 1000 workers", p99.get(1_000), 1.0, at_most=True),
        Target("decide_p99_ms at 10000 workers", p99.get(10_000), 5.0, at_most=True),
    ]


async def run(num_routes: int, seed: int) -> list[Row]:
    """All sizes."""
    rows: list[Row] = []
    for size in SIZES:
        gc.collect()
        rows.append(await measure(size, num_routes, seed))
        sys.stderr.write(", ".join(f"{name} {value}" for name, value in rows[-1].items()) + "\n")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--routes", type=int, default=5_000, help="decisions per size")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "routing.json")
    arguments = parser.parse_args(argv)
    rows = asyncio.run(run(arguments.routes, arguments.seed))
    result = document(rows, targets_of(rows), arguments.seed, NOTES)
    save(result, arguments.out)
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
