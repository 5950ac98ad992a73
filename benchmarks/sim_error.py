"""The simulator against real stacks: `kvmesh profile`, then the same requests measured and
simulated.

    python -m benchmarks.sim_error
    python -m benchmarks.sim_error --again bench/results/sim_error.json

`kvmesh profile --url` measures a stack of one prefill and one decode worker. Its file alone is what
the simulator knows of all stacks that follow: fleets under loads, with shared prefixes and role
switches, and policies under one load, whose order is compared. `--again` takes what was measured
from an earlier result, and only simulates.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.result import RESULTS, ROOT, Row, Target, document, markdown, save
from benchmarks.sim_error_load import (
    NUM_USERS,
    PLACED,
    PROBES,
    SUSTAINED_S,
    Stack,
    arrivals,
    seeds_of,
    warming,
)
from benchmarks.sim_error_model import modelled_metrics, simulated, simulated_rate, slowed
from kvmesh.cli.bench_report import git_commit

FLEETS = ((1, 1), (2, 2), (1, 3))
"""Prefill and decode workers."""

LOADS = (0.2, 0.5, 0.8)
"""Shares of the rate that was sustained."""

POLICIES = ("kvmesh", "cache_load", "least_loaded", "round_robin", "local_queues")
"""Live policies whose order is compared: ten pairs."""

RANKED_FLEET, RANKED_LOAD = (2, 2), 0.8
RANKED = ("ttft p50", "ttft p90", "tpot p50", "tpot p90")
"""What policies are compared by."""

APART = 0.05
"""Relative difference of two policies, live, from which on their order counts."""

NOTES = f"""\
workers, a gateway, scheduler, kvmanager, Redis and the client that sends share the cores of the
 machine
- half of the prompts begin with one of four shared prefixes of 512 tokens, then come 64 to 640
 others, log-uniform; answers have 32 tokens; arrivals are Poisson's
- the profile is the file of `kvmesh profile --url`, measured once at a stack of one prefill and one
 decode worker: first tokens of lone prompts, steps of batches of 1, 4 and 8, both beside each
 other, and the processor time of all but the engines
- other tenants slow the machine for minutes: decode steps of {PROBES} lone requests before and
 after each load, over those of the profile, multiply all times of the profile for this load
- load is the share of the rate at which {NUM_USERS} users in a closed loop were served by that
 fleet; each load ran with several seeds, whose requests count together; times are in milliseconds;
 error is simulated / measured - 1
- an order is right if the better policy of a pair is the same in both; pairs count that differ by
 {APART:.0%} live, with the same one better in every seed""".replace("\n ", " ").split("\n- ")


def in_stack(stack: Stack, command: Sequence[str]) -> None:
    """Starts a stack, runs a command beside it, and stops it.

    Raises:
        subprocess.CalledProcessError: one of them failed.
    """
    # The simulator's workers have one core each.
    workers = ["--prefill", str(stack.prefill), "--decode", str(stack.decode), "--threads", "1"]
    run = ["--port", "0", "--run", shlex.join([sys.executable, *command])]
    up = [sys.executable, "-m", "kvmesh.cli", "up", *workers, *run]
    environment = {**os.environ, "KVMESH_ROUTING__POLICY": stack.policy}
    subprocess.run(up, check=True, env=environment, cwd=ROOT)


def profiled(model: Path, out: Path) -> dict[str, Any]:
    """Measures a stack of one prefill and one decode worker."""
    command = ["-m", "kvmesh.cli", "profile", "--model", str(model), "--out", str(out)]
    in_stack(Stack(1, 1, POLICIES[0]), command)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def lone_step_s(profile: Mapping[str, Any]) -> float:
    """Seconds of a decode step of a lone request in a profile."""
    seconds: float = profile["measured"]["short"][0]["step_s"]
    return seconds


def stack_of(measured: Mapping[str, Any]) -> Stack:
    """The stack of a measurement."""
    return Stack(measured["prefill"], measured["decode"], measured["policy"])


def measured(stack: Stack, loads: Sequence[float], **flags: float) -> dict[str, Any]:
    """Measures loads of one stack.

    Args:
        flags: further flags of `benchmarks.sim_error_load`.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "live.json"
        command = ["-m", "benchmarks.sim_error_load", "--label", stack.label, "--out", str(out)]
        command += ["--loads", *map(str, loads)]
        for name, value in flags.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        in_stack(stack, command)
        found: dict[str, Any] = json.loads(out.read_text())
        return {**asdict(stack), **found}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Profiles, then measures all fleets, then all policies."""
    flags = {each: getattr(arguments, each) for each in ("seconds", "seed", "seeds")}
    with tempfile.TemporaryDirectory() as folder:
        profile = profiled(arguments.model, Path(folder) / "stack.json")
        load = {**flags, "step_s": lone_step_s(profile)}
        fleets = [measured(Stack(*fleet, POLICIES[0]), LOADS, **load) for fleet in FLEETS]
        rate = fleets[FLEETS.index(RANKED_FLEET)]["rate"]
        stacks = [Stack(*RANKED_FLEET, policy) for policy in POLICIES]
        policies = [measured(each, [RANKED_LOAD], rate=rate, **load) for each in stacks]
        date = datetime.now(UTC).isoformat(timespec="seconds")
        return {
            "date": date,
            "commit": git_commit(ROOT),
            **flags,
            "profile": profile,
            "fleets": fleets,
            "policies": policies,
        }


def compared(live: Mapping[str, Any], part: str) -> list[Row]:
    """Simulates what was measured of fleets or policies: a row for each metric of each load."""
    rows: list[Row] = []
    for each in live[part]:
        stack, rate = stack_of(each), each["rate"]
        begin: Row = {"part": part, "stack": stack.label}
        if part == "fleets":
            profile = slowed(live["profile"], statistics.mean(slower_of(each)))
            says = round(simulated_rate(profile, stack, SUSTAINED_S, live["seed"]), 2)
            row = {**begin, "load": f"{NUM_USERS} users", "metric": "requests/s"}
            rows.append({**row, "measured": rate, "simulated": says, **_error(rate, says)})
        warm = warming(rate)
        for number, load in enumerate(each["loads"]):
            seeds = seeds_of(number, len(each["loads"]), live["seed"], live["seeds"])
            models = [
                simulated(
                    slowed(live["profile"], slower),
                    stack,
                    arrivals(load["share"] * rate, live["seconds"], seed),
                    warm,
                )
                for seed, slower in zip(seeds, load["slower"], strict=True)
            ]
            for metric, says in modelled_metrics(models).items():
                row = {**begin, "load": f"{load['share']:g}", "metric": metric}
                row |= {"measured": load[metric], "simulated": says}
                row |= {} if metric == PLACED else _error(load[metric], says)
                rows.append({**row, "requests": load["requests"]})
    return rows


def slower_of(measured: Mapping[str, Any]) -> list[float]:
    """How slow the machine was in each load of a stack, over the profile."""
    return [slower for load in measured["loads"] for slower in load["slower"]]


def _error(measured: float, simulated: float) -> Row:
    return {"error_percent": round(100 * (simulated / measured - 1), 1)}


def agreement(live: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> tuple[int, int]:
    """How many pairs of policies are ordered alike, and how many differ live.

    Args:
        live: what was measured of the policies, under one load.
        rows: the same, compared.
    """
    alike = apart = 0
    said = {(row["stack"], row["metric"]): row["simulated"] for row in rows}
    for metric, (one, other) in itertools.product(RANKED, itertools.combinations(live, 2)):
        first, second = one["loads"][0], other["loads"][0]
        is_less = first[metric] < second[metric]
        by_seed = zip(first["by_seed"], second["by_seed"], strict=True)
        if any((a[metric] < b[metric]) is not is_less for a, b in by_seed):
            continue  # noise may have made the order
        low, high = sorted((first[metric], second[metric]))
        if high < (1 + APART) * low:
            continue
        apart += 1
        labels = (stack_of(one).label, stack_of(other).label)
        alike += is_less == (said[labels[0], metric] < said[labels[1], metric])
    return alike, apart


def targets(
    live: Mapping[str, Any], fleets: Sequence[Row], policies: Sequence[Row]
) -> list[Target]:
    """Errors at every load, the largest of each metric; and the order of policies."""
    found: list[Target] = []
    for metric, most in (("ttft p50", 15), ("ttft p90", 15), ("tpot p50", 10), ("tpot p90", 10)):
        for stack in dict.fromkeys(row["stack"] for row in fleets):
            own = [row for row in fleets if (row["stack"], row["metric"]) == (stack, metric)]
            worst = max(abs(row["error_percent"]) for row in own)
            found.append(Target(f"{stack}: {metric}, largest error, %", worst, most, at_most=True))
    alike, apart = agreement(live["policies"], policies)
    if apart:
        found.append(Target(f"policies ordered alike, of {apart} pairs, share", alike / apart, 0.9))
    return found


def run(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Measures, or reads what was measured, then simulates."""
    if arguments.again is None:
        live = measure(arguments)
    else:
        live = json.loads(arguments.again.read_text())["live"]
    fleets, policies = compared(live, "fleets"), compared(live, "policies")
    told = f"measured on {live['date'][:10]} at commit {live['commit'] or 'unknown'}"
    found = [slower for each in (*live["fleets"], *live["policies"]) for slower in slower_of(each)]
    speed = f"the machine took {min(found):.2f} to {max(found):.2f} times as long as in the profile"
    notes = [*NOTES, speed, told]
    result = document([*fleets, *policies], targets(live, fleets, policies), live["seed"], notes)
    return {**result, "live": live}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a load with each seed")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of each load")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "pydoc-6m")
    parser.add_argument(
        "--again", type=Path, help="result whose measurements are simulated again; measures nothing"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "sim_error.json")
    arguments = parser.parse_args(argv)
    result = run(arguments)
    save(result, arguments.out)
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
