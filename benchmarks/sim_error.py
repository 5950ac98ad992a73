"""The simulator against real stacks: `kvmesh profile`, then the same requests measured and
simulated.

    python -m benchmarks.sim_error

`kvmesh profile --url` measures a stack of one prefill and one decode worker. Its file alone is what
the simulator knows of all stacks that follow: fleets under loads, with shared prefixes and role
switches, and policies under one load, whose order is compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.result import RESULTS, ROOT, Row, Target, document, markdown, save
from benchmarks.sim_error_load import NUM_USERS, Stack

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
 others; answers have 32 tokens; arrivals are Poisson's
- the profile is the file of `kvmesh profile --url`, measured once at a stack of one prefill and one
 decode worker: first tokens of lone prompts, steps of batches of 1, 4 and 8, both beside each
 other, and the processor time of what stands before the workers
- load is the share of the rate at which {NUM_USERS} users in a closed loop were served by that
 fleet; each load ran with several seeds, whose requests count together; times are in milliseconds;
 error is simulated / measured - 1
- an order is right if the better policy of a pair is the same in both; pairs count that differ by
 {APART:.0%} live""".replace("\n ", " ").split("\n- ")


def in_stack(stack: Stack, command: Sequence[str]) -> None:
    """Starts a stack, runs a command beside it, and stops it.

    Raises:
        subprocess.CalledProcessError: one of them failed.
    """
    workers = ["--prefill", str(stack.prefill), "--decode", str(stack.decode)]
    run = ["--port", "0", "--run", shlex.join([sys.executable, *command])]
    up = [sys.executable, "-m", "kvmesh.cli", "up", *workers, *run]
    environment = {**os.environ, "KVMESH_ROUTING__POLICY": stack.policy}
    subprocess.run(up, check=True, env=environment, cwd=ROOT)


def profiled(model: Path, out: Path) -> None:
    """Measures a stack of one prefill and one decode worker."""
    command = ["-m", "kvmesh.cli", "profile", "--model", str(model), "--out", str(out)]
    in_stack(Stack(1, 1, POLICIES[0]), command)


def rows_of(stack: Stack, profile: Path, loads: Sequence[float], **flags: float) -> list[Row]:
    """Measured and simulated loads of one stack.

    Args:
        flags: further flags of `benchmarks.sim_error_load`.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = ["-m", "benchmarks.sim_error_load", "--profile", str(profile), "--out", str(out)]
        command += ["--prefill", str(stack.prefill), "--decode", str(stack.decode)]
        command += ["--policy", stack.policy, "--loads", *map(str, loads)]
        for name, value in flags.items():
            command += [f"--{name}", str(value)]
        in_stack(stack, command)
        found: list[Row] = json.loads(out.read_text())
        return found


def agreement(rows: Sequence[Row]) -> tuple[int, int]:
    """How many pairs of policies are ordered alike, and how many differ live.

    Args:
        rows: of the policies under one load.
    """
    alike = apart = 0
    for metric in RANKED:
        own = [row for row in rows if row["metric"] == metric]
        for one, other in itertools.combinations(own, 2):
            live = (one["measured"], other["measured"])
            if max(live) < (1 + APART) * min(live):
                continue
            apart += 1
            alike += (live[0] < live[1]) == (one["simulated"] < other["simulated"])
    return alike, apart


def targets(rows: Sequence[Row], ranked: Sequence[Row]) -> list[Target]:
    """Errors at every load, the largest of each metric; and the order of policies."""
    found: list[Target] = []
    for metric, most in (("ttft p50", 15), ("ttft p90", 15), ("tpot p50", 10), ("tpot p90", 10)):
        for stack in dict.fromkeys(row["stack"] for row in rows):
            own = [row for row in rows if (row["stack"], row["metric"]) == (stack, metric)]
            worst = max(abs(row["error_percent"]) for row in own)
            found.append(Target(f"{stack}: {metric}, largest error, %", worst, most, at_most=True))
    alike, apart = agreement(ranked)
    if apart:
        found.append(Target(f"policies ordered alike, of {apart} pairs, share", alike / apart, 0.9))
    return found


def run(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Profiles, then all fleets, then all policies."""
    flags = {each: getattr(arguments, each) for each in ("seconds", "seed", "seeds")}
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "stack.json"
        profiled(arguments.model, profile)
        rows: list[Row] = []
        ranked: list[Row] = []
        rates: dict[tuple[int, int], float] = {}
        for fleet in FLEETS:
            own = rows_of(Stack(*fleet, POLICIES[0]), profile, LOADS, **flags)
            rates[fleet] = own[0]["measured"]
            rows += own
        for policy in POLICIES:
            stack, rate = Stack(*RANKED_FLEET, policy), rates[RANKED_FLEET]
            ranked += rows_of(stack, profile, [RANKED_LOAD], rate=rate, **flags)
    compared = [{"part": "fleets", **row} for row in rows]
    compared += [{"part": "policies", **row} for row in ranked]
    return document(compared, targets(rows, ranked), arguments.seed, NOTES)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a load with each seed")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of each load")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "pydoc-6m")
    parser.add_argument("--out", type=Path, default=RESULTS / "sim_error.json")
    arguments = parser.parse_args(argv)
    result = run(arguments)
    save(result, arguments.out)
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
