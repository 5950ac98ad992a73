"""The simulator against real stacks: `kvmesh profile`, then the same requests measured and
simulated.

    python -m benchmarks.sim_error
    python -m benchmarks.sim_error --again bench/results/sim_error.json

`kvmesh profile --url` measures a stack of one prefill and one decode worker. Its file alone is what
the simulator knows of all stacks that follow: fleets under loads, with shared prefixes and role
switches, and policies under one load, whose order is compared. All of this is done with two kinds
of engines (`ENGINES`). `--again` takes what was measured from an earlier result, and only
simulates.
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
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.result import RESULTS, ROOT, Row, Target, document, markdown, save
from benchmarks.sim_error_load import (
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


@dataclass(frozen=True, slots=True)
class Engines:
    """How the workers of a stack compute.

    Attributes:
        users: number of users in a closed loop that show the rate which a fleet sustains.
        flags: of `kvmesh up`.
        options: of the workers, as environment variables.
        share_cores: whether they compute on the machine's cores, which other tenants slow.
    """

    users: int
    flags: Sequence[str]
    options: Mapping[str, str] = field(default_factory=dict)
    share_cores: bool = False


ENGINES = {
    # The simulator's workers have one core each.
    "cpu": Engines(8, ("--threads", "1"), share_cores=True),
    "devices": Engines(
        16,
        ("--engine", "fake"),
        {
            "KVMESH_ENGINE__FAKE_PROFILE": str(
                ROOT / "libs" / "kvmesh" / "sim" / "profiles" / "flowkv.json"
            ),
            "KVMESH_ENGINE__FAKE_DEVICE": "a100",
            # As many as the KV of `MODEL` has.
            "KVMESH_ENGINE__FAKE_TOKEN_BYTES": "3072",
        },
    ),
}
"""With `cpu`, the embedded model is computed on the cores that all processes share. With `devices`,
an engine waits for as long as an A100 computes a step of Llama-3.1-8B by FlowKV's profile, and
moves KV for real: cores are used as on a machine with a device for each worker."""

MODEL = ROOT / "models" / "pydoc-6m"

NUM_BLOCKS = 4096
"""Of a worker's KV. The simulator's blocks are 32 times as long, so it would run out of few ones
earlier than a real worker."""

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
 machine; engines `cpu` compute the embedded model on the same cores, `devices` wait for as long as
 an A100 computes a step of Llama-3.1-8B by FlowKV's profile, and move KV for real
- half of the prompts begin with one of four shared prefixes of 512 tokens, then come 64 to 640
 others, log-uniform; answers have 32 tokens; arrivals are Poisson's
- the profile is the file of `kvmesh profile --url`, measured once at a stack of one prefill and one
 decode worker: first tokens of lone prompts, steps of batches of 1, 4 and 8, both beside each
 other, and the processor time of all but the engines
- other tenants slow the machine for minutes: with engines `cpu`, decode steps of {PROBES} lone
 requests before and after each load, over those of the profile, multiply all times of the profile
 for this load
- load is the share of the rate at which the named number of users in a closed loop were served by
 that fleet; each load ran with several seeds, whose requests count together; times are in
 milliseconds; error is simulated / measured - 1
- `measured twice` is the same requests to the same fleet, minutes apart: error is the second
 measurement / the first one - 1
- an order is right if the better policy of a pair is the same in both; pairs count that differ by
 {APART:.0%} live, with the same one better in every seed""".replace("\n ", " ").split("\n- ")


def in_stack(engines: Engines, stack: Stack, command: Sequence[str]) -> None:
    """Starts a stack, runs a command beside it, and stops it.

    Raises:
        subprocess.CalledProcessError: one of them failed.
    """
    workers = ["--prefill", str(stack.prefill), "--decode", str(stack.decode)]
    flags = ["--model", str(MODEL), *engines.flags, "--port", "0"]
    flags += ["--num-blocks", str(NUM_BLOCKS)]
    run = ["--run", shlex.join([sys.executable, *command])]
    environment = {**os.environ, **engines.options, "KVMESH_ROUTING__POLICY": stack.policy}
    up = [sys.executable, "-m", "kvmesh.cli", "up", *workers, *flags, *run]
    subprocess.run(up, check=True, env=environment, cwd=ROOT)


def profiled(engines: Engines) -> dict[str, Any]:
    """Measures a stack of one prefill and one decode worker."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stack.json"
        command = ["-m", "kvmesh.cli", "profile", "--model", str(MODEL), "--out", str(out)]
        command += ["--num-blocks", str(NUM_BLOCKS)]
        in_stack(engines, Stack(1, 1, POLICIES[0]), command)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def lone_step_s(profile: Mapping[str, Any]) -> float:
    """Seconds of a decode step of a lone request in a profile."""
    seconds: float = profile["measured"]["short"][0]["step_s"]
    return seconds


def stack_of(measured: Mapping[str, Any]) -> Stack:
    """The stack of a measurement."""
    return Stack(measured["prefill"], measured["decode"], measured["policy"])


def measured(
    engines: Engines, stack: Stack, loads: Sequence[float], **flags: float
) -> dict[str, Any]:
    """Measures loads of one stack.

    Args:
        flags: further flags of `benchmarks.sim_error_load`.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "live.json"
        command = ["-m", "benchmarks.sim_error_load", "--label", stack.label, "--out", str(out)]
        command += ["--loads", *map(str, loads), "--users", str(engines.users)]
        for name, value in flags.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        in_stack(engines, stack, command)
        found: dict[str, Any] = json.loads(out.read_text())
        return {**asdict(stack), **found}


def measure(engines: Engines, **flags: float) -> dict[str, Any]:
    """Profiles, then measures all fleets, then all policies."""
    profile = profiled(engines)
    load = {**flags, "step_s": lone_step_s(profile) if engines.share_cores else 0.0}
    fleets = [measured(engines, Stack(*each, POLICIES[0]), LOADS, **load) for each in FLEETS]
    rate = fleets[FLEETS.index(RANKED_FLEET)]["rate"]
    policies = [
        measured(engines, Stack(*RANKED_FLEET, each), [RANKED_LOAD], rate=rate, **load)
        for each in POLICIES
    ]
    return {"profile": profile, "fleets": fleets, "policies": policies}


def measure_all(names: Sequence[str], **flags: float) -> dict[str, Any]:
    """Measures with each of these engines."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    found = {name: measure(ENGINES[name], **flags) for name in names}
    return {"date": date, "commit": git_commit(ROOT), **flags, "engines": found}


def compared(live: Mapping[str, Any], name: str, part: str) -> list[Row]:
    """Simulates what was measured of fleets or policies: a row for each metric of each load.

    Args:
        name: of the engines.
    """
    rows: list[Row] = []
    users, found = ENGINES[name].users, live["engines"][name]
    for each in found[part]:
        stack, rate = stack_of(each), each["rate"]
        begin: Row = {"engines": name, "part": part, "stack": stack.label}
        if part == "fleets":
            profile = slowed(found["profile"], statistics.mean(slower_of(each)))
            says = round(simulated_rate(profile, stack, users, SUSTAINED_S, live["seed"]), 2)
            row = {**begin, "load": f"{users} users", "metric": "requests/s"}
            rows.append({**row, "measured": rate, "simulated": says, **_error(rate, says)})
        warm = warming(rate)
        for load in each["loads"]:
            seeds = seeds_of(load["share"], live["seed"], live["seeds"])
            models = [
                simulated(
                    slowed(found["profile"], slower),
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


def measured_twice(live: Mapping[str, Any], name: str) -> list[Row]:
    """Rows for the load that one fleet got in both parts: how far two measurements differ.

    Args:
        name: of the engines.
    """
    found = live["engines"][name]
    stack = Stack(*RANKED_FLEET, POLICIES[0])
    twice = [
        load
        for each in (*found["fleets"], *found["policies"])
        for load in each["loads"]
        if stack_of(each) == stack and load["share"] == RANKED_LOAD
    ]
    if len(twice) < 2:
        return []
    begin = {"engines": name, "part": "measured twice", "stack": stack.label}
    return [
        {**begin, "load": f"{RANKED_LOAD:g}", "metric": metric, "measured": twice[0][metric]}
        | {"measured again": twice[1][metric], **_error(twice[0][metric], twice[1][metric])}
        | {"requests": twice[1]["requests"]}
        for metric in RANKED
    ]


def slower_of(measured: Mapping[str, Any]) -> list[float]:
    """How slow the machine was in each load of a stack, over the profile."""
    return [slower for load in measured["loads"] for slower in load["slower"]]


def _error(measured: float, said: float) -> Row:
    return {"error_percent": round(100 * (said / measured - 1), 1)}


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
    name: str, live: Sequence[Mapping[str, Any]], fleets: Sequence[Row], policies: Sequence[Row]
) -> list[Target]:
    """Errors at every load, the largest of each metric; and the order of policies.

    Args:
        name: of the engines.
        live: what was measured of the policies.
    """
    found: list[Target] = []
    for metric, most in (("ttft p50", 15), ("ttft p90", 15), ("tpot p50", 10), ("tpot p90", 10)):
        for stack in dict.fromkeys(row["stack"] for row in fleets):
            own = [row for row in fleets if (row["stack"], row["metric"]) == (stack, metric)]
            worst = max(abs(row["error_percent"]) for row in own)
            told = f"{name}, {stack}: {metric}, largest error, %"
            found.append(Target(told, worst, most, at_most=True))
    alike, apart = agreement(live, policies)
    if apart:
        told = f"{name}: policies ordered alike, of {apart} pairs, share"
        found.append(Target(told, alike / apart, 0.9))
    return found


def run(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Measures, or reads what was measured, then simulates."""
    if arguments.again is None:
        flags = {each: getattr(arguments, each) for each in ("seconds", "seed", "seeds")}
        live = measure_all(arguments.engines, **flags)
    else:
        live = json.loads(arguments.again.read_text())["live"]
    rows: list[Row] = []
    goals: list[Target] = []
    slower: list[float] = []
    for name, found in live["engines"].items():
        fleets, policies = compared(live, name, "fleets"), compared(live, name, "policies")
        rows += [*fleets, *policies, *measured_twice(live, name)]
        goals += targets(name, found["policies"], fleets, policies)
        slower += [
            times for each in (*found["fleets"], *found["policies"]) for times in slower_of(each)
        ]
    told = f"measured on {live['date'][:10]} at commit {live['commit'] or 'unknown'}"
    speed = (
        f"the machine took {min(slower):.2f} to {max(slower):.2f} times as long as in the profile"
    )
    result = document(rows, goals, live["seed"], [*NOTES, speed, told])
    return {**result, "live": live}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a load with each seed")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of each load")
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=list(ENGINES),
        default=list(ENGINES),
        help="kinds of engines",
    )
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
