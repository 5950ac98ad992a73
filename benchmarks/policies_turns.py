"""PrfaaS: whether the next turns of conversations stay at home, where their KV lies.

The KV of a conversation is on the worker that generated its last answer. PrfaaS's threshold is for
the tokens that home lacks, decode workers included. The baseline asks prefill workers only, so
later turns look long and leave. Tests: tests/unit/benchmarks/test_policies.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

from benchmarks.policies_experiments import (
    Experiment,
    Job,
    Outcome,
    Rows,
    Verdict,
    run_scenarios,
)
from benchmarks.policies_scale import is_compiled
from benchmarks.result import Target
from kvmesh.core.types import Role
from kvmesh.policy import offload_route
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.scenario import Scenario
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.workload import Workload, make_requests

NAME = "PrfaaS: next turns"
FLEET = "remote:h200:prefill:4,home:h20:prefill:3,home:h20:decode:5"
GBIT_S = (24, 6, 3)
"""Bandwidth out of the remote cluster."""

_counted = offload_route._longest_match


def _prefill_workers_only(workers: Any, query: Any, matches: Any) -> Any:
    """The baseline: what decode workers hold does not count for the choice of a cluster."""
    return _counted([each for each in workers if each.info.role is not Role.DECODE], query, matches)


COUNTS: Mapping[str, Callable[..., Any]] = {
    "prefill workers only": _prefill_workers_only,
    "all workers": _counted,
}


def next_turns(size: float, seed: int) -> Experiment:
    """Conversations of five turns over links of several widths, at two seeds."""
    profile = load_profile("prfaas")
    lengths = LengthDistribution.log_normal(9.0, 0.8, 256, 65_536)
    workload = Workload(int(1000 * size), 2.5, lengths, output_tokens=256, turns=5)
    loads = [make_requests(workload, seed + number) for number in range(2)]
    jobs: list[Job] = []
    for gbit_s in GBIT_S:
        links = dataclasses.replace(profile.links, between_bytes_per_s=gbit_s * 1e9 / 8)
        costs = dataclasses.replace(profile, links=links)
        scenarios = [Scenario(costs, parse_fleet(FLEET), SYSTEMS["kvmesh"], load) for load in loads]
        for counts in COUNTS:
            label = f"{gbit_s} Gbit/s, {counts}"
            weight = sum(map(len, loads))
            jobs.append(Job(NAME, label, partial(_run, label, counts, scenarios), weight))
    return Experiment(NAME, jobs, _judge)


def _run(label: str, counts: str, scenarios: list[Scenario]) -> Outcome:
    assert not is_compiled(offload_route), "compiled callers keep their own function"
    with patch.object(offload_route, "_longest_match", COUNTS[counts]):
        return run_scenarios(label, scenarios)


def _judge(rows: Rows) -> Verdict:
    before, after = COUNTS
    targets: list[Target] = []
    for gbit_s in GBIT_S:
        was, now = rows[f"{gbit_s} Gbit/s, {before}"], rows[f"{gbit_s} Gbit/s, {after}"]
        targets += [
            Target(f"next turns at {gbit_s} Gbit/s: share sent away over that of the baseline",
                   now["remote"] / was["remote"], 1.0, at_most=True),
            Target(f"next turns at {gbit_s} Gbit/s: goodput over that of the baseline",
                   now["goodput/s"] / was["goodput/s"], 0.98),
        ]  # fmt: skip
    return Verdict(targets, ["the baseline counts the prefixes of prefill workers only"])
