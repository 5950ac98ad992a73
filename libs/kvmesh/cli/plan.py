"""`kvmesh plan`: searches the number of instances per role and the threshold of remote prefill.

Tests: tests/unit/sim/test_plan.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from kvmesh.cli.flags import (
    add_flag,
    count,
    new_parser,
    not_negative,
    output_file,
    picture_file,
    positive,
    positive_int,
)
from kvmesh.cli.progress import Stages
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.prfaas import Hardware
from kvmesh.sim.plan import TTFT_S, make_plan, plan_record, plan_text, splits
from kvmesh.sim.profile import Profile, gbps
from kvmesh.sim.profile_file import load_profile, shipped_profiles
from kvmesh.sim.trace import read_trace, uncached_lengths

DESCRIPTION = """\
Finds the routing threshold and the split into prefill and decode instances that serve the most
requests per second, by the throughput model of PrfaaS (section 3.4)."""


def main(argv: Sequence[str]) -> int:
    """Prints a plan."""
    arguments = _parser().parse_args(argv)
    profile = load_profile(arguments.profile)
    hardware = _hardware(arguments, profile)
    stages = Stages("splits")
    with stages.stage("search", len(splits(hardware))) as advance:
        plan = make_plan(
            profile.serving,
            _lengths(arguments, profile),
            hardware,
            lambda _split: advance(""),
            arguments.ttft_s,
        )
    print(f"profile {profile.name}: {profile.description}\n\n{plan_text(plan)}", end="")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(plan_record(plan), indent=2) + "\n")
    if arguments.plot:
        from kvmesh.sim.plan_plot import plot_plan  # noqa: PLC0415 - matplotlib takes a second

        plot_plan(plan, Path(arguments.plot))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "kvmesh plan", DESCRIPTION, "example: kvmesh plan --profile prfaas --plot plan.png"
    )
    known = ", ".join(shipped_profiles())
    add_flag(parser, "--profile", "prfaas", f"costs: a JSON file, or one of {known}")
    add_flag(
        parser, "--remote", None, "number of prefill instances in the remote cluster", kind=count
    )
    add_flag(parser, "--local", None, "number of instances in the local cluster", kind=positive_int)
    add_flag(
        parser, "--egress-gbps", None, "bandwidth between the clusters in Gbit/s", kind=not_negative
    )
    add_flag(
        parser, "--ttft-s", TTFT_S, "limit on the time to first token, in seconds", kind=positive
    )
    add_flag(parser, "--lengths", "", "trace file from which prompt lengths are taken")
    add_flag(parser, "--json", "", "file to which the plan is written as JSON", kind=output_file)
    add_flag(
        parser,
        "--plot",
        "",
        "file to which a plot of the search is written (PNG, SVG or PDF)",
        kind=picture_file,
    )
    return parser


def _lengths(arguments: argparse.Namespace, profile: Profile) -> LengthDistribution:
    if not arguments.lengths:
        return profile.plan.lengths
    return uncached_lengths(read_trace(Path(arguments.lengths)))


def _hardware(arguments: argparse.Namespace, profile: Profile) -> Hardware:
    egress = arguments.egress_gbps
    return Hardware(
        num_remote=profile.plan.num_remote if arguments.remote is None else arguments.remote,
        num_local=profile.plan.num_local if arguments.local is None else arguments.local,
        egress_bytes_per_s=profile.links.between_bytes_per_s if egress is None else gbps(egress),
    )
