"""`kvmesh simulate`: replays a trace or a synthetic workload on one or more systems.

Tests: tests/unit/sim/test_report.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

from kvmesh.cli.flags import (
    add_flag,
    add_switch,
    count,
    new_parser,
    not_negative,
    output_file,
    positive,
    positive_int,
)
from kvmesh.cli.progress import Advance, Stages
from kvmesh.core.errors import ConfigError
from kvmesh.policy.pdserve import TimeoutTier
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.profile import Profile
from kvmesh.sim.profile_file import load_profile, shipped_profiles
from kvmesh.sim.report import csv_table, summarize, summary_record, table
from kvmesh.sim.scenario import Objectives, Scenario, parse_failures
from kvmesh.sim.simulation import Result, simulate
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.tiers import TierSizes
from kvmesh.sim.trace import read_trace
from kvmesh.sim.trace_request import TraceRequest
from kvmesh.sim.workload import Workload, make_requests, scale_rate, spread_ticks

DESCRIPTION = """\
Runs the policies, admission, block pool and handoff of the services against modelled step times
and links, in virtual time. Equal flags give equal results."""

EXAMPLE = """\
example: kvmesh simulate --profile prfaas --system kvmesh,all_local \\
    --fleet remote:h200:prefill:4,home:h20:prefill:3,home:h20:decode:5 --rate 3 --html run.html"""


def main(argv: Sequence[str]) -> int:
    """Runs every named system and prints a table."""
    arguments = _parser().parse_args(argv)
    profile = load_profile(arguments.profile)
    requests = _requests(arguments, profile)
    # All scenarios first: a wrong name is reported before the first run.
    names = list(dict.fromkeys(arguments.system.split(",")))
    scenarios = [(name, _scenario(arguments, profile, name, requests)) for name in names]
    runs: list[tuple[str, Result]] = []
    num_events, started = 0, time.perf_counter()
    stages = Stages("requests", "kvmesh simulate")
    last_s = max((request.arrival_s for request in requests), default=0.0)
    for name, scenario in scenarios:
        with stages.stage(name, len(requests), f"{last_s:,.0f} s to simulate") as advance:
            result = _simulated(scenario, last_s, advance)
        num_events += result.num_events
        runs.append((name, result))
    elapsed = time.perf_counter() - started
    print(table([(name, summarize(result)) for name, result in runs]), end="")
    print(f"\n{num_events:,} events in {elapsed:.1f} s, {num_events / elapsed:,.0f} per second")
    _save(arguments, runs)
    return 0


def _simulated(scenario: Scenario, last_s: float, advance: Advance) -> Result:
    """Runs a scenario whose last request arrives at `last_s`."""

    def ended(now_s: float) -> None:
        # The last answers end some time after the last request has arrived.
        advance(f"{now_s:,.0f} of {max(now_s, last_s):,.0f} s simulated")

    return simulate(scenario, ended)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("kvmesh simulate", DESCRIPTION, EXAMPLE)
    known = ", ".join(shipped_profiles())
    add_flag(parser, "--profile", "flowkv", f"costs: a JSON file, or one of {known}")
    add_flag(parser, "--system", "kvmesh", f"systems to compare: {', '.join(SYSTEMS)}")
    fleet = "home:a100:prefill:4,home:a100:decode:4"
    add_flag(
        parser,
        "--fleet",
        fleet,
        "workers as CLUSTER:DEVICE:ROLE:COUNT, comma-separated; cluster `remote` only prefills",
    )
    _add_workload_flags(parser)
    add_switch(parser, "--chains", "let idle prefill workers compute long prompts together")
    _add_tier_flags(parser)
    add_flag(
        parser, "--failures", "", "failures as SECONDS:kill|restart|link:VALUE, comma-separated"
    )
    add_flag(
        parser,
        "--jitter",
        0.1,
        "maximum random delay of transfers, as a fraction of their duration",
        kind=not_negative,
    )
    add_flag(parser, "--seed", 0, "random seed of arrivals, ties and jitter", kind=count)
    _add_limit_flags(parser)
    _add_output_flags(parser)
    return parser


def _add_workload_flags(parser: argparse.ArgumentParser) -> None:
    text = (
        "trace file in the format of Mooncake, Azure, BurstGPT or KVMesh; default: "
        "synthetic requests"
    )
    add_flag(parser, "--trace", "", text)
    add_flag(
        parser,
        "--requests",
        1000,
        "number of requests to generate, or to read from the trace",
        kind=positive_int,
    )
    add_flag(
        parser,
        "--load",
        1.0,
        "factor by which the arrival rate of a trace is multiplied",
        kind=positive,
    )
    add_flag(parser, "--rate", 1.0, "arrival rate of synthetic requests, per second", kind=positive)
    add_flag(
        parser,
        "--burst",
        1.0,
        "ratio of the arrival rates in bursts and between them",
        kind=positive,
    )
    add_flag(parser, "--turns", 1, "turns per synthetic session", kind=positive_int)
    add_flag(parser, "--shared", 0, "number of prefixes that synthetic sessions share", kind=count)
    add_switch(
        parser,
        "--closed-loop",
        "send each turn of a session only after the answer to the turn before",
    )


def _add_tier_flags(parser: argparse.ArgumentParser) -> None:
    text = "pool of each worker in KV blocks of 512 tokens; 0: the size of its device"
    add_flag(parser, "--pool-blocks", 0, text, kind=count)
    text = "host-memory tier of each worker in KV blocks of 512 tokens; 0: none"
    add_flag(parser, "--host-blocks", 0, text, kind=count)
    add_flag(
        parser,
        "--disk-blocks",
        0,
        "disk tier of each worker in KV blocks of 512 tokens; 0: none",
        kind=count,
    )
    add_flag(
        parser,
        "--host-gb-s",
        25.0,
        "bandwidth for loading KV from host memory, in GB/s",
        kind=positive,
    )
    add_flag(
        parser, "--disk-gb-s", 6.0, "bandwidth for loading KV from disk, in GB/s", kind=positive
    )


def _add_limit_flags(parser: argparse.ArgumentParser) -> None:
    text = "limit on the time to first token in ms; 0: 5 s, 30 s for prompts over 8,192 tokens"
    add_flag(parser, "--ttft-ms", 0.0, text, kind=not_negative)
    text = "limit on the mean time per output token, in ms"
    add_flag(parser, "--tpot-ms", 100.0, text, kind=positive)
    text = "limit on the time between two tokens that workers keep, in ms; 0: no limit"
    add_flag(parser, "--itl-ms", 0.0, text, kind=not_negative)


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    add_flag(
        parser, "--json", "", "file to which all numbers are written as JSON", kind=output_file
    )
    add_flag(
        parser,
        "--csv",
        "",
        "file to which the table is written as CSV, one row per system",
        kind=output_file,
    )
    add_flag(parser, "--png", "", "file to which the plots are written (PNG)", kind=output_file)
    add_flag(
        parser,
        "--html",
        "",
        "file to which table and plots are written as one HTML page",
        kind=output_file,
    )


def _requests(arguments: argparse.Namespace, profile: Profile) -> tuple[TraceRequest, ...]:
    if arguments.trace:
        read = read_trace(Path(arguments.trace), arguments.requests)
        return scale_rate(spread_ticks(read, arguments.seed), arguments.load)
    if arguments.burst < 1:
        raise ConfigError("--burst must be at least 1")
    workload = Workload(
        arguments.requests,
        arguments.rate,
        profile.plan.lengths,
        burst=arguments.burst,
        output_tokens=profile.plan.output_tokens,
        turns=arguments.turns,
        num_shared=arguments.shared,
    )
    return make_requests(workload, arguments.seed)


def _scenario(
    arguments: argparse.Namespace,
    profile: Profile,
    system: str,
    requests: tuple[TraceRequest, ...],
) -> Scenario:
    if system not in SYSTEMS:
        raise ConfigError(f"there is no system {system!r}; known are {', '.join(SYSTEMS)}")
    fleet, failures = parse_fleet(arguments.fleet), parse_failures(arguments.failures)
    num_workers = sum(group.count for group in fleet)
    for failure in failures:
        if failure.index >= num_workers:
            raise ConfigError(
                f"--failures names worker {failure.index}; the fleet has 0 to {num_workers - 1}"
            )
    return Scenario(
        profile=_with_pools(profile, arguments.pool_blocks),
        fleet=fleet,
        system=SYSTEMS[system],
        requests=requests,
        closed_loop=arguments.closed_loop,
        failures=failures,
        objectives=objectives(arguments.ttft_ms, arguments.tpot_ms, arguments.itl_ms),
        seed=arguments.seed,
        jitter=arguments.jitter,
        chains=arguments.chains,
        tiers=TierSizes(
            arguments.host_blocks,
            arguments.disk_blocks,
            arguments.host_gb_s * 1e9,
            arguments.disk_gb_s * 1e9,
        ),
    )


def _with_pools(profile: Profile, num_blocks: int) -> Profile:
    """The same devices with pools of another size; 0 leaves them as they are."""
    if not num_blocks:
        return profile
    devices = profile.devices.items()
    changed = {name: dataclasses.replace(device, num_blocks=num_blocks) for name, device in devices}
    return dataclasses.replace(profile, devices=changed)


def objectives(ttft_ms: float, tpot_ms: float, itl_ms: float = 0.0) -> Objectives:
    """Returns the limits of goodput.

    Args:
        ttft_ms: TTFT limit; 0 keeps the limits by prompt length.
        tpot_ms: TPOT limit.
        itl_ms: ITL limit; 0 is no limit.
    """
    limits = Objectives(tpot_s=tpot_ms / 1000, itl_s=itl_ms / 1000 if itl_ms else math.inf)
    if not ttft_ms:
        return limits
    every_length = TimeoutTier(limits.timeouts[-1].max_tokens, ttft_ms / 1000)
    return dataclasses.replace(limits, timeouts=(every_length,))


def _save(arguments: argparse.Namespace, runs: list[tuple[str, Result]]) -> None:
    if arguments.json:
        record = {name: summary_record(result) for name, result in runs}
        Path(arguments.json).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    if arguments.csv:
        summaries = [(name, summarize(result)) for name, result in runs]
        Path(arguments.csv).write_text(csv_table(summaries))
    if not arguments.png and not arguments.html:
        return
    from kvmesh.sim.plots import Series, png, write_html  # noqa: PLC0415 - matplotlib: a second

    series = [Series.of(name, result) for name, result in runs]
    if arguments.png:
        Path(arguments.png).write_bytes(png(series))
    if arguments.html:
        rows = table([(name, summarize(result)) for name, result in runs])
        write_html(series, rows, f"kvmesh simulate: {arguments.profile}", Path(arguments.html))
