"""What the simulator and its routes cost: a thousand workers, ten thousand, a million requests.

Tests: tests/unit/benchmarks/test_policies.py.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType

from benchmarks.policies_experiments import Experiment, Job, Outcome, Rows, Verdict, summary_row
from benchmarks.result import Row, Target
from kvmesh.core.summary_statistics import percentile
from kvmesh.core.types import Refusal, RoutePlan
from kvmesh.policy import routing
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.report import summarize
from kvmesh.sim.router import Decide
from kvmesh.sim.scenario import Scenario
from kvmesh.sim.simulation import Simulation
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.workload import Workload, make_requests

MILLION = 1_000_000
PART = 30_000
"""Requests of a short run; a longer one takes a bit more per request."""

REQUESTS_PER_S = {"yes": 10_000, "no": 3_000}
"""Simulated requests per second of CPU among a thousand workers: compiled, and as Python."""
ROUTE_MS = {1000: 1.0, 10_000: 5.0}
"""99th percentile of a decision by the number of workers."""

NOTIFY_EVERY = 10_000


TIMED_ONE_IN = 8
"""Reading the CPU's clock costs as much as a part of a decision, so most are not timed."""


class _Timed:
    """Notes the CPU time of some route decisions, lookup of the prefix included."""

    def __init__(self) -> None:
        self.route_s: list[float] = []
        self._num_routed = 0

    def __call__(self, decide: Decide) -> RoutePlan | Refusal:
        self._num_routed += 1
        if self._num_routed % TIMED_ONE_IN:
            return decide()
        began = time.thread_time()
        plan = decide()
        self.route_s.append(time.thread_time() - began)
        return plan


class _Progress:
    """A line for every ten thousand requests that ended."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, _now_s: float) -> None:
        self._count += 1
        if self._count % NOTIFY_EVERY == 0:
            used = time.process_time()
            print(f"{self._count} requests, {used:.0f} s of CPU", file=sys.stderr, flush=True)


def is_compiled(module: ModuleType) -> bool:
    """Whether a module of the simulator runs as `scripts.compile_simulator` compiled it."""
    return not str(module.__file__).endswith(".py")


def scenario_of(num_requests: int, num_workers: int, seed: int) -> Scenario:
    """Prompts of about a thousand tokens, 64 of whose beginnings are common; half of the workers
    prefill.
    """
    lengths = LengthDistribution.log_normal(7.0, 0.8, 64, 8192)
    workload = Workload(num_requests, 1.5 * num_workers, lengths, output_tokens=128, num_shared=64)
    half = num_workers // 2
    return Scenario(
        load_profile("flowkv"),
        parse_fleet(f"home:a100:prefill:{half},home:a100:decode:{num_workers - half}"),
        SYSTEMS["kvmesh"],
        make_requests(workload, seed),
        sample_s=60.0,
    )


def _scaled(
    num_requests: int, num_workers: int, seed: int, ended: Callable[[float], object] | None = None
) -> Outcome:
    began, began_wall = time.process_time(), time.perf_counter()
    scenario = scenario_of(num_requests, num_workers, seed)
    made = time.process_time()
    timed = _Timed()
    result = Simulation(scenario, ended, timed).run()
    ran = time.process_time()
    row: Row = {
        **summary_row(summarize(result)),
        "workers": num_workers,
        "compiled": "yes" if is_compiled(routing) else "no",
        "CPU s": round(time.process_time() - began, 1),
        "wall s": round(time.perf_counter() - began_wall, 1),
        "events/s": round(result.num_events / (ran - made)),
        "requests per CPU s": round(num_requests / (ran - began)),
        "route p50 ms": round(1e3 * percentile(timed.route_s, 50), 3),
        "route p99 ms": round(1e3 * percentile(timed.route_s, 99), 3),
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    return Outcome(row)


def _judge(rows: Rows) -> Verdict:
    thousand = rows["1000 workers"]
    targets = [
        Target("scale: requests per CPU second on 1,000 workers",
               thousand["requests per CPU s"], REQUESTS_PER_S[thousand["compiled"]]),
    ]  # fmt: skip
    targets += [
        Target(f"scale: route p99 at {row['workers']:,} workers, ms", row["route p99 ms"],
               ROUTE_MS[row["workers"]], at_most=True)
        for row in rows.values()
    ]  # fmt: skip
    note = f"{thousand['requests']:,} requests at {thousand['events/s']:,} events/s"
    return Verdict(targets, [note])


def scale(size: float, seed: int) -> Experiment:
    """A thousand workers with a part of the million requests, and ten thousand for the routes."""
    name = "Scale"
    sizes = ((int(PART * size), 1000), (int(PART / 3 * size), 10_000))
    jobs = [
        Job(name, f"{workers} workers", partial(_scaled, count, workers, seed), 1e5)
        for count, workers in sizes
    ]
    return Experiment(name, jobs, _judge)


def million(seed: int) -> Experiment:
    """All million requests on a thousand workers, with progress."""
    name = "Scale: a million requests"
    run = partial(_scaled, MILLION, 1000, seed, _Progress())
    return Experiment(name, [Job(name, "1000 workers", run)], _judge)
