"""Goodput over limits, loads and traces, against baselines with the same rights.

What is compared with what: docs/evaluation.md. Tests: tests/unit/benchmarks/test_policies_grid.py.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.policies_bound import most_goodput
from benchmarks.policies_experiments import Experiment, Job, Outcome, Rows, Verdict
from benchmarks.result import Row, Target, interval
from kvmesh.core.summary_statistics import percentile
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.pdserve import TimeoutTier
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.report import Summary, summarize
from kvmesh.sim.scenario import Objectives, Scenario
from kvmesh.sim.simulation import simulate
from kvmesh.sim.steps import ChunkTokens
from kvmesh.sim.systems import SYSTEMS, System
from kvmesh.sim.trace import read_trace
from kvmesh.sim.trace_request import TraceRequest
from kvmesh.sim.workload import Workload, make_requests, scale_rate, spread_ticks

REPORT_S = 0.5
"""Age of the loads that routes see, of every system: as often as a live worker reports at least."""

OURS = "kvmesh"
"""Ten workers without roles under the default policy, whatever the trace."""

WITH_ROLES = f"{OURS}, roles 6:4"
"""The same policy on six prefill and four decode workers."""

TPOT_MS = (100, 50, 30, 25)
NUM_WORKERS = 10
DEVICE = "a100"


@dataclass(frozen=True, slots=True)
class Entrant:
    """A system with a fleet, in the grid."""

    label: str
    system: System
    fleet: str
    chunks: ChunkTokens = ChunkTokens()


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of a trace at a rate, once for each seed."""

    trace: str
    rate: float
    by_seed: tuple[tuple[TraceRequest, ...], ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a cell.

    Attributes:
        ttft_share: of the default limits by prompt length (5 s, and 30 s above 8,192 tokens).
    """

    tpot_ms: int
    ttft_share: float = 1.0

    @property
    def objectives(self) -> Objectives:
        """For a scenario."""
        tiers = tuple(
            TimeoutTier(each.max_tokens, each.timeout_s * self.ttft_share)
            for each in Objectives().timeouts
        )
        return Objectives(tiers, self.tpot_ms / 1000)

    def __str__(self) -> str:
        return f"{self.tpot_ms} ms" + (f", TTFT x{self.ttft_share:g}" if self.rushed else "")

    @property
    def rushed(self) -> bool:
        """Whether first tokens have to come sooner than by the default."""
        return self.ttft_share != 1.0


def with_equal_rights(system: System) -> System:
    """A system that knows the limit on the time per token and sees loads as old as all others do.

    Requests wait at the gateway while their first token can come in time, by the rule of live
    gateways. In systems with `queue_offers` they wait at the worker, by the same rule.
    """
    return dataclasses.replace(system, knows_tpot=True, report_interval_s=REPORT_S)


def split(num_prefill: int) -> str:
    """A fleet of prefill and decode workers."""
    return f"home:{DEVICE}:prefill:{num_prefill},home:{DEVICE}:decode:{NUM_WORKERS - num_prefill}"


def entrants() -> list[Entrant]:
    """Ours first, then ours with roles, then the others."""
    systems = {name: with_equal_rights(SYSTEMS[name]) for name in SYSTEMS}
    mixed = f"home:{DEVICE}:hybrid:{NUM_WORKERS}"
    found = [
        Entrant(OURS, systems[OURS], mixed, ChunkTokens(512, 512)),
        Entrant(WITH_ROLES, systems[OURS], split(6)),
    ]
    for label, tokens in (("SGLang-like", 8192), ("vLLM-like", 2048), ("small chunks", 512)):
        chunks = ChunkTokens(tokens, tokens)
        found.append(Entrant(f"mixed, {label}", systems["cache_aware"], mixed, chunks))
    for num in (5, 6, 7, 8):
        label = f"static {num}:{NUM_WORKERS - num}"
        found.append(Entrant(label, systems["cache_load"], split(num)))
    found.append(Entrant("SGLang-like 6:4", systems["cache_aware"], split(6)))
    found.append(Entrant("Mooncake-like 6:4", systems["cache_centric"], split(6)))
    return found


# --- what arrives --------------------------------------------------------------------------------


def code_completion(num_requests: int, rate: float, seed: int) -> tuple[TraceRequest, ...]:
    """Made requests with the lengths of code completion: medium prompts, very short answers, bursts
    (after the Azure trace of 2023, which is not in the repository).
    """
    lengths = LengthDistribution.log_normal(7.3, 1.0, 32, 8192)
    workload = Workload(num_requests, rate, lengths, burst=2.0, output_tokens=28)
    made = make_requests(workload, seed)
    # Bursts make the mean of a short run another one than was asked for.
    return scale_rate(made, rate * made[-1].arrival_s / num_requests)


RATES: Mapping[str, tuple[float, ...]] = {
    "made code completion": (25.0, 35.0, 50.0),
    "agentic_coding_sessions": (0.7, 1.0, 1.5),
    "mooncake_conversation_0_30min": (2.2, 3.0, 4.2),
}
"""Requests per second at which ten workers are busy, at which they are full, and at which no system
serves all, of known loads."""

KNOWN_TOKENS_PER_S = (38_000.0, 52_000.0, 75_000.0)
"""The same for other traces: uncached prompt tokens per second."""


def loads(traces: Sequence[Path], size: float, seeds: Sequence[int]) -> list[Load]:
    """Every trace at its rates; `size` is the factor on the requests of a run, 0 reads whole
    traces.
    """
    count = int(600 * size) or None
    found = [
        Load(
            "made code completion",
            rate,
            tuple(code_completion(5 * (count or 5000), rate, seed) for seed in seeds),
        )
        for rate in RATES["made code completion"]
    ]
    for path in traces:
        name = path.name.split(".")[0]
        read = read_trace(path, count)
        own = max(read[-1].arrival_s - read[0].arrival_s, 1.0)
        tokens = sum(each.input_tokens for each in read) / len(read)
        by_tokens = tuple(each / tokens for each in KNOWN_TOKENS_PER_S)
        for rate in RATES.get(name, by_tokens):
            factor = rate * own / len(read)
            by_seed = tuple(scale_rate(spread_ticks(read, seed), factor) for seed in seeds)
            found.append(Load(name, round(rate, 2), by_seed))
    return found


# --- a cell --------------------------------------------------------------------------------------


def run_cell(entrant: Entrant, load: Load, limits: Limits) -> Outcome:
    """One system under one load and one pair of limits, at every seed."""
    profile, fleet = load_profile("flowkv"), parse_fleet(entrant.fleet)
    found: list[Summary] = []
    for seed, requests in enumerate(load.by_seed):
        scenario = Scenario(
            profile,
            fleet,
            entrant.system,
            requests,
            objectives=limits.objectives,
            seed=seed,
            chunks=entrant.chunks,
        )
        found.append(summarize(simulate(scenario)))
    goodputs = [each.goodput for each in found]
    device = profile.devices[DEVICE]
    bounds = [most_goodput(each, device, NUM_WORKERS, limits.objectives) for each in load.by_seed]
    return Outcome(
        {
            "trace": load.trace,
            "rate": load.rate,
            "TPOT limit ms": limits.tpot_ms,
            "TTFT limit x": limits.ttft_share,
            "system": entrant.label,
            "goodput/s": round(statistics.mean(goodputs), 4),
            "+-": round(interval(goodputs), 4),
            "success": _mean(found, "success"),
            "TTFT p99": _mean(found, "ttft_p99_s"),
            "TPOT p99": _mean(found, "tpot_p99_s"),
            "ITL p99": _mean(found, "itl_p99_s"),
            "hits": _mean(found, "hit_rate"),
            "at most/s": round(statistics.mean(bounds), 4),
            "by seed": [round(each, 4) for each in goodputs],
        }
    )


def _mean(found: Sequence[Summary], name: str) -> float:
    return float(round(statistics.mean(getattr(each, name) for each in found), 4))


def jobs_of(
    name: str, load: Load, limits: Limits, systems: Sequence[Entrant], prefix: str = ""
) -> Iterator[Job]:
    """A job for each system in a cell."""
    weight = sum(map(len, load.by_seed))
    for each in systems:
        label = f"{prefix}{load.trace} {load.rate:g}/s {limits} {each.label}"
        yield Job(name, label, partial(run_cell, each, load, limits), weight)


# --- what it says --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """A cell of the grid.

    Attributes:
        best: label of the baseline with the most goodput there.
        ratio: ours over it.
        noise: half the 95 % interval of that ratio, from the ratios at equal seeds.
        over_mixed: ours over the best of the mixed ones.
        over_roles: ours over ours with roles.
        spread: what the worst system there lacks, as a share of the best one's goodput.
        goodput: ours, per second.
        bound: largest goodput that any system could have; see `policies_bound`.
        itl_s: 99th percentile of the times between our tokens.
    """

    trace: str
    rate: float
    tpot_ms: int
    ttft_share: float
    best: str
    ratio: float
    noise: float
    over_mixed: float
    over_roles: float
    spread: float
    goodput: float
    bound: float
    itl_s: float
    best_itl_s: float

    @property
    def holds(self) -> bool:
        """Not worse than the best baseline, within noise."""
        return self.ratio + max(self.noise, 0.005) >= 1.0

    @property
    def possible(self) -> float:
        """The largest ratio over the best baseline that any system could have."""
        return self.ratio * self.bound / max(self.goodput, 1e-9)

    @property
    def possible_over_mixed(self) -> float:
        """The same over the best of the mixed ones."""
        return self.over_mixed * self.bound / max(self.goodput, 1e-9)


def compare(rows: Sequence[Row]) -> list[Comparison]:
    """Ours against the best of all others in every cell."""
    cells: dict[tuple[str, float, int, float], dict[str, Row]] = {}
    for row in rows:
        key = (row["trace"], row["rate"], row["TPOT limit ms"], row["TTFT limit x"])
        cells.setdefault(key, {})[row["system"]] = row
    return [_compared(key, cell) for key, cell in cells.items()]


def _compared(key: tuple[str, float, int, float], cell: Mapping[str, Row]) -> Comparison:
    ours = cell[OURS]
    others = {name: row["goodput/s"] for name, row in cell.items() if not name.startswith(OURS)}
    best = max(others, key=lambda name: others[name])
    mixed = max(value for name, value in others.items() if name.startswith("mixed"))
    most = max(others[best], 1e-9)
    ratios = [
        own / max(other, 1e-9)
        for own, other in zip(ours["by seed"], cell[best]["by seed"], strict=True)
    ]
    values = [ours["goodput/s"], *others.values()]
    return Comparison(
        *key,
        best,
        ours["goodput/s"] / most,
        interval(ratios),
        ours["goodput/s"] / max(mixed, 1e-9),
        ours["goodput/s"] / max(cell[WITH_ROLES]["goodput/s"], 1e-9),
        1 - min(values) / max(*values, 1e-9),
        ours["goodput/s"],
        ours.get("at most/s", math.nan),  # tables of earlier runs have none
        ours["ITL p99"],
        cell[best]["ITL p99"],
    )


def grid(found: Sequence[Load], cells: Sequence[Limits]) -> Experiment:
    """Every load under every pair of limits, with every system."""
    name = "Grid"
    jobs = [
        job for load in found for limits in cells for job in jobs_of(name, load, limits, entrants())
    ]
    return Experiment(name, jobs, judge)


def judge(rows: Rows) -> Verdict:
    """The claims on the grid, and where it is lost."""
    found = compare(list(rows.values()))
    apart = [each.ratio for each in found if each.spread >= 0.1]
    tight = [each.over_mixed for each in found if each.tpot_ms == 30]
    targets = [
        Target(
            f"{each.trace}, {each.rate:g}/s, {each.tpot_ms} ms, TTFT x{each.ttft_share:g}: "
            f"ours over the best ({each.best})",
            each.ratio,
            # A ratio within the spread over the seeds is no difference between systems.
            round(1.0 - max(each.noise, 0.005), 3),
        )
        for each in found
    ]
    if apart:
        goal = "grid: median over the best where systems differ by a tenth"
        targets.append(Target(goal, percentile(sorted(apart), 50), 1.3))
    if tight:
        targets.append(Target("grid: least over mixed workers at 30 ms", min(tight), 1.3))
    lost = [each for each in found if not each.holds]
    held = len(found) - len(lost)
    notes = [
        f"ours is at least the best baseline, within noise, in {held} of {len(found)} cells",
        f"ours is {OURS} on workers without roles; with roles 6:4 the same policy is no baseline",
    ]
    if apart and tight:
        notes.append(_possible(found))
    return Verdict(targets, notes)


def _possible(found: Sequence[Comparison]) -> str:
    """Says what the goals would be for a system that serves the bound in every cell."""
    apart = percentile(sorted(each.possible for each in found if each.spread >= 0.1), 50)
    tight = min(each.possible_over_mixed for each in found if each.tpot_ms == 30)
    share = percentile(sorted(each.goodput / max(each.bound, 1e-9) for each in found), 50)
    return (
        f"no system can reach more than {apart:.3f} in the median over the best where systems "
        f"differ by a tenth, nor a least of more than {tight:.3f} over mixed workers at 30 ms; "
        f"ours has {share:.1%} of the bound in the median"
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Ours over the best baseline and over the best mixed one, by limit: a picture per trace."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - a second; only the process that reports

    found = compare(rows)
    traces = list(dict.fromkeys(each.trace for each in found))
    figure = Figure(figsize=(4.5 * len(traces), 3.8), layout="constrained")
    panels = figure.subplots(1, len(traces), squeeze=False, sharey=True)[0]
    for axes, trace in zip(panels, traces, strict=True):
        curves = dict.fromkeys((e.rate, e.ttft_share) for e in found if e.trace == trace)
        for rate, share in curves:
            cells = [e for e in found if (e.trace, e.rate, e.ttft_share) == (trace, rate, share)]
            limits = [str(each.tpot_ms) for each in cells]
            label = f"{rate:g}/s" + (f", TTFT x{share:g}" if share != 1.0 else "")
            line = axes.errorbar(
                limits,
                [each.ratio for each in cells],
                [each.noise for each in cells],
                marker="o",
                capsize=3,
                label=f"{label}, the best",
            )
            axes.plot(
                limits,
                [each.over_mixed for each in cells],
                linestyle=":",
                color=line[0].get_color(),
                label=f"{label}, the best mixed",
            )
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set(title=trace, xlabel="limit on the mean time per token, ms", ylim=(0.5, 3.0))
        axes.legend(fontsize="x-small")
    panels[0].set_ylabel("goodput of the default over ...")
    figure.savefig(path, format="png", dpi=100)
