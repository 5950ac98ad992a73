"""The experiments on made workloads: groups, ratio, offload, phases.

Tests: tests/unit/benchmarks/test_policies.py.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.result import Row, Target
from kvmesh.core.types import Role
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.pdserve import InstanceProfile, choose_ratio, decode_time_s
from kvmesh.sim.fleet import WorkerGroup, parse_fleet
from kvmesh.sim.plots import Series
from kvmesh.sim.profile import Device
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.report import Summary, summarize
from kvmesh.sim.scenario import Scenario, parse_failures
from kvmesh.sim.simulation import simulate
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.trace import matched_blocks
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest
from kvmesh.sim.workload import Workload, make_requests


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job found."""

    row: Row
    series: Series | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One independent run.

    Attributes:
        weight: about how long it takes, relative to others.
    """

    experiment: str
    label: str
    run: Callable[[], Outcome]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rows say about the claims."""

    targets: list[Target]
    notes: list[str] = field(default_factory=list)


Rows = Mapping[str, Row]


@dataclass(frozen=True, slots=True)
class Experiment:
    """Jobs and what is to hold among their rows, which `judge` gets by label."""

    name: str
    jobs: list[Job]
    judge: Callable[[Rows], Verdict]


def summary_row(summary: Summary) -> Row:
    """The numbers of a run as a row."""
    refused = " ".join(f"{reason}:{count}" for reason, count in sorted(summary.refusals.items()))
    return {
        "requests": summary.num_requests,
        "goodput/s": round(summary.goodput, 3),
        "success": round(summary.success, 4),
        "TTFT p50": round(summary.ttft_p50_s, 3),
        "TTFT p99": round(summary.ttft_p99_s, 3),
        "TPOT p50": round(summary.tpot_p50_s, 4),
        "TPOT p99": round(summary.tpot_p99_s, 4),
        "ITL p99": round(summary.itl_p99_s, 4),
        "hits": round(summary.hit_rate, 4),
        "CV": round(summary.cv, 3),
        "link": round(summary.link_use, 3),
        "remote": round(summary.remote_share, 3),
        "refused": refused or "0",
    }


def mean_row(rows: Sequence[Row]) -> Row:
    """The means of all columns of numbers."""
    return {
        name: round(statistics.mean(each[name] for each in rows), 4)
        for name, value in rows[0].items()
        if not isinstance(value, str)
    }


def run_scenario(label: str, scenario: Scenario) -> Outcome:
    """Simulates one scenario."""
    result = simulate(scenario)
    return Outcome(summary_row(summarize(result)), Series.of(label, result))


def job(experiment: str, label: str, scenario: Scenario) -> Job:
    """A job that simulates a scenario."""
    weight = len(scenario.requests)
    return Job(experiment, label, partial(run_scenario, label, scenario), weight)


def run_scenarios(label: str, scenarios: Sequence[Scenario]) -> Outcome:
    """Simulates the same at several seeds: means, all refusals, the first one's series."""
    results = [simulate(scenario) for scenario in scenarios]
    summaries = [summarize(result) for result in results]
    rows = [summary_row(summary) for summary in summaries]
    refused: Counter[str] = Counter()
    for summary in summaries:
        refused.update(summary.refusals)
    row = mean_row(rows)
    words = (f"{reason}:{count}" for reason, count in sorted(refused.items()))
    row["refused"] = " ".join(words) or "0"
    goodputs = [each["goodput/s"] for each in rows]
    row["goodput/s by seed"] = f"{min(goodputs)} to {max(goodputs)}"
    return Outcome(row, Series.of(label, results[0]))


def job_of_seeds(experiment: str, label: str, scenarios: Sequence[Scenario]) -> Job:
    """A job that simulates one load at several seeds."""
    weight = sum(len(scenario.requests) for scenario in scenarios)
    return Job(experiment, label, partial(run_scenarios, label, scenarios), weight)


def experiments(size: float, seed: int) -> list[Experiment]:
    """All of this file."""
    return [
        groups(size, seed),
        ratio(size, seed),
        offload(size, seed),
        phases(size, seed),
    ]


# --- P/D-Serve -----------------------------------------------------------------------------------

_CHAT, _DOCUMENTS = "chat", "documents"
_GROUPED = ("forwarding", "pdserve", "kvmesh")
"""Policies that are compared with and without groups."""


def _run_by_scenario(label: str, scenario: Scenario) -> Outcome:
    """Simulates one scenario; its row also has TTFT and goodput of chats and of documents."""
    result = simulate(scenario)
    row = summary_row(summarize(result))
    for name in (_CHAT, _DOCUMENTS):
        own = [each for each in result.requests if each.trace.scenario == name]
        found = summarize(dataclasses.replace(result, requests=own))
        row[f"{name}: TTFT p99"] = round(found.ttft_p99_s, 3)
        row[f"{name}: goodput/s"] = round(found.goodput, 3)
    return Outcome(row, Series.of(label, result))


def divided(total: int, work: Mapping[str, float]) -> dict[str, int]:
    """Instances of each group in proportion to its work (P/D-Serve's eq. 2), at least one each."""
    whole = sum(work.values())
    exact = {name: total * each / whole for name, each in work.items()}
    found = {name: max(int(each), 1) for name, each in exact.items()}
    while sum(found.values()) < total:
        found[max(exact, key=lambda name: exact[name] - found[name])] += 1
    return found


def group_fleet(requests: Iterable[TraceRequest], device: Device, prefill: int, decode: int) -> str:
    """The fleet in which each scenario has its share of the instances.

    Prefill by seconds for the tokens that no request had before, decode by generated tokens.
    """
    prompts: dict[str, float] = defaultdict(float)
    answers: dict[str, float] = defaultdict(float)
    for each, hits in matched_blocks(requests):
        uncached = max(each.input_tokens - hits * TRACE_BLOCK, 1)
        prompts[each.scenario] += device.prefill_s(uncached)
        answers[each.scenario] += each.output_tokens
    sizes = {"prefill": divided(prefill, prompts), "decode": divided(decode, answers)}
    return ",".join(
        f"{name}:a100:{role}:{count}"
        for role, each in sizes.items()
        for name, count in each.items()
    )


def groups(size: float, seed: int) -> Experiment:
    """Chats and documents, each with a group of its own, against one fleet of as many workers for
    both, by what their clients notice: time to first token, and answers in time.
    """
    name = "P/D-Serve: groups by scenario"
    profile = load_profile("flowkv")
    chat = Workload(int(900 * size), 12.0, LengthDistribution.log_normal(6.0, 0.7, 64, 4096),
                    num_shared=12, output_tokens=128)  # fmt: skip
    document = Workload(int(300 * size), 4.0, LengthDistribution.log_normal(9.0, 0.5, 64, 32_768),
                        num_shared=12, shared_tokens=8192, output_tokens=64)  # fmt: skip
    requests = sorted(
        (
            dataclasses.replace(
                each, scenario=scenario, hash_ids=tuple(id_ + offset for id_ in each.hash_ids)
            )
            for scenario, offset, workload in ((_CHAT, 0, chat), (_DOCUMENTS, 1 << 40, document))
            for each in make_requests(workload, seed + (offset > 0))
        ),
        key=lambda each: each.arrival_s,
    )
    own = group_fleet(requests, profile.devices["a100"], 7, 3)
    fleets = {"one fleet": "home:a100:prefill:7,home:a100:decode:3", "two groups": own}
    jobs = []
    for system in _GROUPED:
        for kind, fleet in fleets.items():
            chosen = dataclasses.replace(SYSTEMS[system], grouped=kind == "two groups")
            label = f"{kind}, {system}"
            scenario = Scenario(profile, parse_fleet(fleet), chosen, tuple(requests))
            jobs.append(Job(name, label, partial(_run_by_scenario, label, scenario), len(requests)))

    def judge(rows: Rows) -> Verdict:
        targets = []
        for system in _GROUPED:
            one, two = rows[f"one fleet, {system}"], rows[f"two groups, {system}"]
            targets += [
                Target(f"groups, {system}: TTFT p99 of {each} over that in one fleet",
                       two[f"{each}: TTFT p99"] / one[f"{each}: TTFT p99"], 1.0, at_most=True)
                for each in (_CHAT, _DOCUMENTS)
            ]  # fmt: skip
            gain = two["goodput/s"] / one["goodput/s"]
            targets.append(Target(f"groups, {system}: goodput over one fleet", gain, 1.0))
        return Verdict(targets, [f"each group has its share of the instances by its work: {own}"])

    return Experiment(name, jobs, judge)


def ratio(size: float, seed: int) -> Experiment:
    """Equation 1's split of eight instances against all others, in saturation."""
    name = "P/D-Serve: ratio by eq. 1"
    profile = load_profile("flowkv")
    device = profile.devices["a100"]
    tokens, output, num = 2048, 200, 8
    # In saturation every slot is in use, and an answer is half generated on average.
    batch = device.decode_slots
    step = device.decode.step_s(batch, batch * (tokens + output / 2))
    decode_s = decode_time_s(0.02, step, output)
    choice = choose_ratio(InstanceProfile(1, device.prefill_s(tokens), batch, decode_s), num, 1)
    lengths = LengthDistribution([tokens])
    workload = Workload(int(600 * size), 40.0, lengths, output_tokens=output)
    requests = make_requests(workload, seed)
    jobs: list[Job] = []
    for num_prefill in range(1, num):
        fleet = (
            WorkerGroup("home", "a100", Role.PREFILL, num_prefill),
            WorkerGroup("home", "a100", Role.DECODE, num - num_prefill),
        )
        scenario = Scenario(profile, fleet, SYSTEMS["forwarding"], requests)
        jobs.append(job(name, f"{num_prefill}:{num - num_prefill}", scenario))

    def judge(rows: Rows) -> Verdict:
        rates = {label: row["goodput/s"] for label, row in rows.items()}
        chosen = rates[f"{choice.num_prefill}:{choice.num_decode}"]
        return Verdict(
            [
                Target("ratio: eq. 1's split over the best", chosen / max(rates.values()), 0.97),
                Target("ratio: eq. 1's split over the worst", chosen / min(rates.values()), 1.5),
            ],
            [f"eq. 1 chose {choice.num_prefill}:{choice.num_decode}"],
        )

    return Experiment(name, jobs, judge)


# --- PrfaaS --------------------------------------------------------------------------------------


def offload(size: float, seed: int) -> Experiment:
    """The case study with bursts, and a link that drops to a third of 24 Gbit/s for five minutes.

    Both at two seeds: loads differ by more than systems do. With a minute of it a moving threshold
    has little to win or lose over minutes of load: rows beside the others, at one seed.
    """
    name = "PrfaaS: bursts and a failing link"
    profile = load_profile("prfaas")
    links = dataclasses.replace(profile.links, between_bytes_per_s=3e9)
    profile = dataclasses.replace(profile, links=links)
    workload = Workload(int(1000 * size), 2.2, profile.plan.lengths, burst=2.0, output_tokens=1024)
    loads = [make_requests(workload, each) for each in (seed, seed + 1)]
    fleet = parse_fleet("remote:h200:prefill:4,home:h20:prefill:3,home:h20:decode:5")

    def scenario(system: str, load: int, failures: str) -> Scenario:
        return Scenario(
            profile, fleet, SYSTEMS[system], loads[load], failures=parse_failures(failures)
        )

    others = ("cache_load", "all_remote", "all_local")
    jobs = [
        job_of_seeds(name, each, [scenario(each, n, "60:link:0.333,360:link:1") for n in (0, 1)])
        for each in ("kvmesh", "prfaas", *others)
    ]
    jobs += [
        job(name, f"a minute: {each}", scenario(each, 0, "120:link:0.333,180:link:1"))
        for each in ("prfaas", "cache_load")
    ]

    def judge(rows: Rows) -> Verdict:
        good = {label: row["goodput/s"] for label, row in rows.items()}
        best = max(good[each] for each in others)
        return Verdict(
            [
                Target("offload: the default over the best fixed choice", good["kvmesh"] / best,
                       1.0),
                Target("offload: adaptive threshold over static", good["prfaas"]
                       / good["cache_load"], 1.0),
            ],
            [
                "`cache_load` is the static threshold",
                "until 2026-11-22 the link was low for a minute, at one seed: rows `a minute`",
            ],
        )  # fmt: skip

    return Experiment(name, jobs, judge)


# --- FlowKV --------------------------------------------------------------------------------------


def phases(size: float, seed: int) -> Experiment:
    """Long prompts and short answers, then the opposite: fixed splits against role switches."""
    name = "FlowKV: phase-shifting load"
    profile = load_profile("flowkv")
    long = LengthDistribution.log_normal(9.0, 0.5, 64, 32_768)
    short = LengthDistribution.log_normal(6.5, 0.5, 64, 8192)
    first = make_requests(Workload(int(325 * size), 6.5, long, output_tokens=40), seed)
    begin = first[-1].arrival_s
    second = make_requests(Workload(int(1200 * size), 24.0, short, output_tokens=900), seed + 1)
    requests = first + tuple(
        dataclasses.replace(
            each,
            arrival_s=each.arrival_s + begin,
            # Ids of both workloads begin at the same number.
            hash_ids=tuple(id_ + (1 << 40) for id_ in each.hash_ids),
        )
        for each in second
    )
    jobs = [
        job(name, f"{n}:{8 - n} {system}", Scenario(
            profile, parse_fleet(f"home:a100:prefill:{n},home:a100:decode:{8 - n}"),
            SYSTEMS[system], requests))
        for n in (2, 4, 6)
        for system in ("cache_load", "pdserve", "flowkv", "kvmesh")
    ]  # fmt: skip

    def judge(rows: Rows) -> Verdict:
        good = {label: row["goodput/s"] for label, row in rows.items()}
        best = max(good[f"{n}:{8 - n} cache_load"] for n in (2, 4, 6))
        targets = [
            Target(f"phases: {system} from {n}:{8 - n} over the best fixed split",
                   good[f"{n}:{8 - n} {system}"] / best, 1.0)
            for n in (2, 4, 6) for system in ("flowkv", "kvmesh")
        ]  # fmt: skip
        monitored = min(good[f"{n}:{8 - n} pdserve"] for n in (2, 4, 6))
        targets.append(
            Target("phases: the monitor from the worst split over the best fixed", monitored / best,
                   0.95)
        )  # fmt: skip
        return Verdict(targets, ["`cache_load` is the fixed split, `pdserve` has the monitor"])

    return Experiment(name, jobs, judge)
