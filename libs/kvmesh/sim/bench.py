"""Every policy against its baselines: `python -m kvmesh.sim.bench --out DIR [--trace FILE ...]`.

Each experiment prints a table and says which of its claims held; nothing is left out if it did not.
Tests: tests/unit/sim/test_bench.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmesh.core.errors import KvMeshError
from kvmesh.core.types import Role
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.pdserve import InstanceProfile, choose_ratio, decode_time_s
from kvmesh.sim.fleet import WorkerGroup, parse_fleet
from kvmesh.sim.plots import write_html
from kvmesh.sim.pool import PoolResult, PoolSettings, run_pool
from kvmesh.sim.profile import load_profile
from kvmesh.sim.report import Summary, summarize, table
from kvmesh.sim.scenario import Scenario, parse_failures
from kvmesh.sim.simulation import Result, simulate
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.trace import TraceRequest, read_trace
from kvmesh.sim.workload import Workload, make_requests, scale_rate, spread_ticks

SEED = 1


@dataclass(frozen=True, slots=True)
class Claim:
    """What should hold, and whether it did."""

    text: str
    held: bool


@dataclass(slots=True)
class Experiment:
    """A finished comparison; `runs` are those that can be plotted."""

    name: str
    table: str
    claims: list[Claim]
    runs: list[tuple[str, Result]]


def _summaries(runs: Sequence[tuple[str, Result]]) -> list[tuple[str, Summary]]:
    return [(label, summarize(result)) for label, result in runs]


# --- P/D-Serve -----------------------------------------------------------------------------------


def forwarding(size: float) -> Experiment:
    """Mixed lengths at one to four times a load: local queues against on-demand forwarding."""
    profile = load_profile("flowkv")
    lengths = LengthDistribution.log_normal(7.5, 1.2, 64, 32_768)
    runs: list[tuple[str, Result]] = []
    for factor in (1, 2, 3, 4):
        count = int(400 * size * factor)
        requests = make_requests(Workload(count, 5.0 * factor, lengths, burst=3.0), SEED)
        for name in ("local_queues", "pending_tokens", "forwarding", "kvmesh"):
            scenario = Scenario(
                profile,
                parse_fleet("home:a100:prefill:6,home:a100:decode:6"),
                SYSTEMS[name],
                requests,
            )
            runs.append((f"{factor}x {name}", simulate(scenario)))
    rows = _summaries(runs)
    success = {label: summary.success for label, summary in rows}
    worst = success["4x forwarding"] - success["4x local_queues"]
    claims = [
        Claim("forwarding succeeds at least as often as local queues at every load", all(
            success[f"{n}x forwarding"] >= success[f"{n}x local_queues"] for n in (1, 2, 3, 4)
        )),
        Claim(f"the composition keeps 99 % up to 4x: {success['4x kvmesh']:.1%}", all(
            success[f"{n}x kvmesh"] >= 0.99 for n in (1, 2, 3, 4)
        )),
        Claim(f"forwarding over local queues at 4x: {worst:+.1%}", worst >= 0),
    ]  # fmt: skip
    return Experiment("P/D-Serve: forwarding", table(rows), claims, runs)


def ratio(size: float) -> Experiment:
    """Equation 1's split of eight instances against all others, in saturation."""
    profile = load_profile("flowkv")
    device = profile.devices["a100"]
    tokens, output, num = 2048, 200, 8
    lengths = LengthDistribution([tokens])
    # In saturation every slot is in use, and an answer is half generated on average.
    batch = device.decode_slots
    step = device.decode.step_s(batch, batch * (tokens + output / 2))
    choice = choose_ratio(
        InstanceProfile(1, device.prefill_s(tokens), batch, decode_time_s(0.02, step, output)),
        num,
        1,
    )
    workload = Workload(int(600 * size), 40.0, lengths, output_tokens=output)
    requests = make_requests(workload, SEED)
    runs: list[tuple[str, Result]] = []
    rates: dict[int, float] = {}
    for num_prefill in range(1, num):
        fleet = (
            WorkerGroup("home", "a100", Role.PREFILL, num_prefill),
            WorkerGroup("home", "a100", Role.DECODE, num - num_prefill),
        )
        result = simulate(Scenario(profile, fleet, SYSTEMS["forwarding"], requests))
        rates[num_prefill] = summarize(result).goodput
        runs.append((f"{num_prefill}:{num - num_prefill}", result))
    chosen, best, worst = rates[choice.num_prefill], max(rates.values()), min(rates.values())
    claims = [
        Claim(f"eq. 1 chose {choice.num_prefill}:{choice.num_decode}, within 3 % of the best "
              f"({chosen:.2f} of {best:.2f} requests/s)", chosen >= 0.97 * best),
        Claim("at least 1.5 times the worst split", chosen >= 1.5 * worst),
    ]  # fmt: skip
    return Experiment("P/D-Serve: ratio by eq. 1", table(_summaries(runs)), claims, runs)


# --- PrfaaS --------------------------------------------------------------------------------------


def offload(size: float) -> Experiment:
    """The case study with bursts, and a link that drops to a third of 24 Gbit/s for a minute."""
    profile = load_profile("prfaas")
    links = dataclasses.replace(profile.links, between_bytes_per_s=3e9)
    profile = dataclasses.replace(profile, links=links)
    workload = Workload(int(1000 * size), 2.2, profile.plan.lengths, burst=2.0, output_tokens=1024)
    requests = make_requests(workload, SEED)
    fleet = parse_fleet("remote:h200:prefill:4,home:h20:prefill:3,home:h20:decode:5")
    failures = parse_failures("120:link:0.333,180:link:1")
    runs = [
        (name, simulate(Scenario(profile, fleet, SYSTEMS[name], requests, failures=failures)))
        for name in ("kvmesh", "prfaas", "cache_load", "all_remote", "all_local")
    ]
    rows = _summaries(runs)
    goodput = {label: summary.goodput for label, summary in rows}
    claims = [
        Claim("the adaptive threshold is at least as good as the static one (cache_load)",
              goodput["prfaas"] >= goodput["cache_load"]),
        Claim("a threshold beats all remote and all local",
              goodput["cache_load"] > max(goodput["all_remote"], goodput["all_local"])),
    ]  # fmt: skip
    return Experiment("PrfaaS: bursts and a failing link", table(rows), claims, runs)


# --- FlowKV --------------------------------------------------------------------------------------


def phases(size: float) -> Experiment:
    """Prompts are long and answers short, then the opposite: fixed splits against role switches."""
    profile = load_profile("flowkv")
    count = int(400 * size)
    first = make_requests(
        Workload(count, 4.0, LengthDistribution.log_normal(9.0, 0.5, 64, 32_768), output_tokens=40),
        SEED,
    )
    begin = first[-1].arrival_s
    second = make_requests(
        Workload(count, 8.0, LengthDistribution.log_normal(6.5, 0.5, 64, 8192), output_tokens=900),
        SEED + 1,
    )
    requests = first + tuple(
        dataclasses.replace(
            each,
            arrival_s=each.arrival_s + begin,
            # Ids of both workloads begin at the same number.
            hash_ids=tuple(id_ + (1 << 40) for id_ in each.hash_ids),
        )
        for each in second
    )
    runs: list[tuple[str, Result]] = []
    for num_prefill in (2, 4, 6):
        fleet = parse_fleet(f"home:a100:prefill:{num_prefill},home:a100:decode:{8 - num_prefill}")
        for name in ("cache_load", "flowkv", "kvmesh"):
            label = f"{num_prefill}:{8 - num_prefill} {name}"
            runs.append((label, simulate(Scenario(profile, fleet, SYSTEMS[name], requests))))
    rows = _summaries(runs)
    goodput = {label: summary.goodput for label, summary in rows}
    claims = [
        Claim(f"from {n}:{8 - n} role switches beat the fixed split",
              goodput[f"{n}:{8 - n} flowkv"] > goodput[f"{n}:{8 - n} cache_load"])
        for n in (2, 4, 6)
    ]  # fmt: skip
    return Experiment("FlowKV: phase-shifting load", table(rows), claims, runs)


# --- TokenLake -----------------------------------------------------------------------------------


def pool(requests: Sequence[TraceRequest], name: str) -> Experiment:
    """One pool of segments against caches per worker, at equal memory."""
    lines = ["| capacity | caches     | hits  | CV    | copies |\n", "|---|---|---|---|---|\n"]
    found: dict[tuple[int, str], PoolResult] = {}
    for capacity in (500, 2000):
        for label, settings in (
            ("pool", PoolSettings(8, capacity)),
            ("no copies", PoolSettings(8, capacity, replicate=False)),
            ("per worker", PoolSettings(8, capacity, pooled=False)),
        ):
            result = found[capacity, label] = run_pool(requests, settings, SEED)
            lines.append(
                f"| {capacity:8} | {label:10} | {result.hit_rate:.1%} | {result.mean_cv:.1%} "
                f"| {result.copies_made} |\n"
            )
    claims = [
        Claim(f"CV at most 15 % with {capacity} segments per worker: "
              f"{found[capacity, 'pool'].mean_cv:.1%}", found[capacity, "pool"].mean_cv <= 0.15)
        for capacity in (500, 2000)
    ] + [
        Claim(f"more hits than caches per worker with {capacity}",
              found[capacity, "pool"].hit_rate >= found[capacity, "per worker"].hit_rate)
        for capacity in (500, 2000)
    ]  # fmt: skip
    return Experiment(f"TokenLake: pool, {name}", "".join(lines), claims, [])


# --- the composition -----------------------------------------------------------------------------


def _is_best(goodput: Mapping[str, float], label: str) -> Claim:
    """Whether a run has the highest goodput; runs within a thousandth are equal."""
    highest = max(goodput.values())
    best = [name for name in goodput if goodput[name] >= 0.999 * highest]
    if label not in best:
        return Claim(f"{label} has the best goodput; it has {goodput[label] / highest:.1%} of "
                     f"that of {best[0]}", held=False)  # fmt: skip
    beaten = len(goodput) - len(best)
    return Claim(f"{label} has the best goodput: {beaten} others have less, "
                 f"{len(best) - 1} the same", held=True)  # fmt: skip


def composition(
    requests: tuple[TraceRequest, ...], name: str, rates: Sequence[float]
) -> Experiment:
    """The default against each single policy and each baseline, at several loads."""
    profile = load_profile("flowkv")
    fleet = parse_fleet("home:a100:prefill:6,home:a100:decode:4")
    mean_rate = len(requests) / max(requests[-1].arrival_s, 1.0)
    names = [each for each in SYSTEMS if each not in {"all_remote", "all_local", "prfaas"}]
    runs: list[tuple[str, Result]] = []
    claims: list[Claim] = []
    for rate in rates:
        scaled = scale_rate(requests, rate / mean_rate)
        at_rate = [
            (f"{rate:g}/s {system}", simulate(Scenario(profile, fleet, SYSTEMS[system], scaled)))
            for system in names
        ]
        goodput = {label: summary.goodput for label, summary in _summaries(at_rate)}
        claims.append(_is_best(goodput, f"{rate:g}/s kvmesh"))
        runs += at_rate
    return Experiment(f"Composition: {name}", table(_summaries(runs)), claims, runs)


def _experiments(traces: Sequence[Path], size: float) -> list[Callable[[], Experiment]]:
    made = make_requests(
        Workload(
            int(1200 * size),
            4.0,
            LengthDistribution.log_normal(7.5, 1.0, 64, 16_384),
            turns=4,
            num_shared=8,
        ),
        SEED,
    )
    workloads = [("made sessions", made)]
    for path in traces:
        read = spread_ticks(read_trace(path, int(2000 * size)), SEED)
        workloads.append((path.name.split(".")[0], read))
    parts: list[Callable[[], Experiment]] = [
        lambda: forwarding(size),
        lambda: ratio(size),
        lambda: offload(size),
        lambda: phases(size),
    ]
    for name, requests in workloads:
        # Rates that the ten instances can just do depend on the lengths; see the tables.
        rates = (4.0, 10.0, 16.0) if name == "made sessions" else (1.0, 2.0, 3.0)
        parts.append(lambda name=name, requests=requests: pool(requests, name))  # type: ignore[misc]
        parts.append(
            lambda name=name, requests=requests, rates=rates: composition(requests, name, rates)  # type: ignore[misc]
        )
    return parts


def main(argv: Sequence[str]) -> int:
    """Runs all experiments; writes policies.md, policies.json and a page with plots for each."""
    parser = argparse.ArgumentParser("python -m kvmesh.sim.bench")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="trace files to add")
    parser.add_argument("--size", type=float, default=1.0, help="factor on the requests per run")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    text, record = "# Policies in the simulator\n", {}
    for number, experiment in enumerate(_experiments(arguments.trace, arguments.size)):
        done = experiment()
        claims = "".join(f"- {'holds' if c.held else 'FAILS'}: {c.text}\n" for c in done.claims)
        section = f"\n## {done.name}\n\n{done.table}\n{claims}"
        sys.stdout.write(section)
        text += section
        record[done.name] = {
            "claims": {claim.text: claim.held for claim in done.claims},
            "runs": {
                label: dataclasses.asdict(summary) for label, summary in _summaries(done.runs)
            },
        }
        if done.runs:
            write_html(done.runs, done.name, arguments.out / f"policies_{number}.html")
    (arguments.out / "policies.md").write_text(text)
    (arguments.out / "policies.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KvMeshError as error:
        sys.exit(f"kvmesh.sim.bench: {error}")
