"""PrfaaS's case study (Table 6): the paper, the throughput model, and events, side by side.

The model says at which rate the slowest stage is always busy. Events serve less, for two reasons:
the mean of the prefill times is up to 5 % more than the time of the mean length, and a decode slot
is held while its prompt is computed. `rate_in_time` counts both.
Tests: tests/unit/benchmarks/test_policies.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import mean

from benchmarks.policies_experiments import Experiment, Job, Outcome, Rows, Verdict
from benchmarks.result import Target, interval
from kvmesh.policy.pdserve import TimeoutTier
from kvmesh.policy.prfaas import Hardware, OperatingPoint, operating_point
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.plan import TTFT_S, make_plan
from kvmesh.sim.plan_ttft import rate_in_time
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.scenario import Objectives, Scenario
from kvmesh.sim.simulation import Result, simulate
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.workload import Workload, make_requests

NAME = "PrfaaS: Table 6"

NUM_LOCAL, NUM_REMOTE, NUM_ALONE = 8, 4, 12

PATIENT = Objectives((TimeoutTier(1 << 62, 1e9),), tpot_s=1e9)
"""Nobody gives up, so that what is served is what the fleet can."""

OVERLOAD = 1.3
"""Rate over the model's, for the rate that events serve at most."""

SEEDS = range(1, 6)
"""Of the runs at the plan's rate. Nine tenths of the fleet are busy then, and a few dozen more
prompts than usual fill a queue for a minute: one run of ten minutes says little."""

SETTLED = 0.4
"""Part of the arrivals that fills the fleet and is not counted."""


@dataclass(frozen=True, slots=True)
class Column:
    """One of the paper's three systems.

    Attributes:
        paper: its requests per second in Table 6.
        system: name of the policy that does the same in the simulator.
    """

    label: str
    paper: float
    system: str


OURS = Column("4 remote, 8 local", 3.24, "cache_load")
ALONE = Column("12 local", 2.11, "cache_load")
NAIVE = Column("4 remote for all prompts, 8 local for all answers", 2.45, "all_remote")


def _point(column: Column) -> tuple[Hardware, OperatingPoint]:
    profile = load_profile("prfaas")
    serving, lengths = profile.serving, profile.plan.lengths
    egress = profile.links.between_bytes_per_s
    if column is ALONE:
        hardware = Hardware(0, NUM_ALONE, egress)
        return hardware, make_plan(serving, lengths, hardware).best
    hardware = Hardware(NUM_REMOTE, NUM_LOCAL, egress)
    if column is NAIVE:
        return hardware, operating_point(serving, lengths, hardware, 0.0, 0)
    return hardware, make_plan(serving, lengths, hardware).best


def _events(
    column: Column, point: OperatingPoint, num_remote: int, rate: float, num: int, seed: int = 1
) -> Result:
    profile = load_profile("prfaas")
    groups = {"remote:h200:prefill": num_remote, "home:h20:prefill": point.num_prefill,
              "home:h20:decode": point.num_decode}  # fmt: skip
    fleet = ",".join(f"{group}:{count}" for group, count in groups.items() if count)
    workload = Workload(num, rate, profile.plan.lengths, output_tokens=profile.plan.output_tokens)
    requests = make_requests(workload, seed)
    return simulate(
        Scenario(profile, parse_fleet(fleet), SYSTEMS[column.system], requests, objectives=PATIENT)
    )


def served_per_s(result: Result) -> float:
    """First tokens per second while requests still arrive, after the fleet has filled."""
    last = result.requests[-1].arrival_s
    begin = SETTLED * last
    firsts = (each.first_token_s for each in result.requests)
    count = sum(at is not None and begin < at <= last for at in firsts)
    return count / (last - begin)


def share_in_time(result: Result) -> float:
    """Fraction of the requests that got their first token within `TTFT_S`."""
    requests = result.requests
    found = sum(each.ttft_s is not None and each.ttft_s <= TTFT_S for each in requests)
    return found / len(requests)


def _run(column: Column, num: int) -> Outcome:
    profile = load_profile("prfaas")
    hardware, point = _point(column)
    told = rate_in_time(profile.serving, profile.plan.lengths, hardware, point, TTFT_S)
    most = served_per_s(_events(column, point, hardware.num_remote, OVERLOAD * point.rate, num))
    calm = [_events(column, point, hardware.num_remote, told, num, seed) for seed in SEEDS]
    in_time = [share_in_time(each) for each in calm]
    return Outcome(
        {
            "threshold_tokens": point.threshold_tokens if 0 < point.share_remote < 1 else None,
            "num_prefill": point.num_prefill,
            "num_decode": point.num_decode,
            "share_remote": round(point.share_remote, 3),
            "paper/s": column.paper,
            "model/s": round(point.rate, 3),
            "events/s": round(most, 3),
            "in time/s": round(told, 3),
            "in time by events": round(mean(in_time), 3),
            "95 %": round(interval(in_time), 3),
        }
    )


def case_study(size: float) -> Experiment:
    """All three columns."""
    num = max(int(1500 * size), 100)
    jobs = [
        Job(NAME, each.label, partial(_run, each, num), 6 * num) for each in (OURS, ALONE, NAIVE)
    ]
    return Experiment(NAME, jobs, judge)


def judge(rows: Rows) -> Verdict:
    """What the paper says, and what the plan tells."""
    ours, alone, naive = (rows[each.label] for each in (OURS, ALONE, NAIVE))
    threshold = ours["threshold_tokens"]
    least = min(rows.values(), key=lambda row: row["in time by events"])
    return Verdict(
        [
            Target("case study: requests/s (3.24)", ours["model/s"], 3.14),
            Target("case study: threshold, tokens (19.4K)", threshold, 19_900, at_most=True),
            Target("case study: over one kind of hardware (1.54)",
                   ours["model/s"] / alone["model/s"], 1.49),
            Target("case study: over naive (1.32)", ours["model/s"] / naive["model/s"], 1.25),
            Target("case study: events over one kind of hardware",
                   ours["events/s"] / alone["events/s"], 1.49),
            Target("case study: events over naive", ours["events/s"] / naive["events/s"], 1.25),
            Target(f"case study: first tokens within {TTFT_S:g} s at the rate of the plan, least",
                   least["in time by events"], round(0.9 - least["95 %"], 3)),
        ]
    )  # fmt: skip
