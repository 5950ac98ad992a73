"""The planner: searches threshold and split (PrfaaS 3.4.2), and reports the optimum.

Tests: tests/unit/sim/test_plan.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvmesh.core.errors import ConfigError
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.pdserve import RatioChoice, choose_ratio
from kvmesh.policy.prfaas import (
    Hardware,
    OperatingPoint,
    ServingProfile,
    optimum,
    search,
    threshold_grid,
)
from kvmesh.policy.profiled_ratio import planned_profile
from kvmesh.sim.plan_ttft import IN_TIME, rate_in_time

TTFT_S = 10.0
"""Default limit on the time to the first token, in seconds."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A finished search.

    Attributes:
        points: the whole grid, split by split.
        best: its optimum.
        lengths: distribution of uncached prompt tokens.
        ttft_s: limit on the time to the first token.
        ttft_rate: requests per second at which most first tokens keep it; below `best.rate`, at
            which queues grow without end.
        ratio: P/D-Serve's split of the local instances, by eq. 1, as if all prompts were computed
            at home; None with fewer than two instances.
    """

    points: list[OperatingPoint]
    best: OperatingPoint
    hardware: Hardware
    lengths: LengthDistribution
    ttft_s: float
    ttft_rate: float
    ratio: RatioChoice | None


def splits(hardware: Hardware) -> range:
    """Returns the numbers of local prefill instances that a plan may have."""
    return range(hardware.num_local + 1)


def make_plan(
    profile: ServingProfile,
    lengths: LengthDistribution,
    hardware: Hardware,
    searched: Callable[[int], object] | None = None,
    ttft_s: float = TTFT_S,
) -> Plan:
    """Searches the grid.

    Args:
        searched: called with each number of local prefill instances, after its part of the grid.
        ttft_s: limit on the time to the first token.

    Raises:
        ConfigError: no point serves any request.
    """
    thresholds = threshold_grid(lengths)
    points: list[OperatingPoint] = []
    for split in splits(hardware):
        points += search(profile, lengths, hardware, thresholds, [split])
        if searched is not None:
            searched(split)
    best = optimum(points)
    if best.rate <= 0:
        raise ConfigError("no split of these instances serves a request: too few of them")
    in_time = rate_in_time(profile, lengths, hardware, best, ttft_s)
    ratio = None
    if hardware.num_local >= 2:
        ratio = choose_ratio(planned_profile(profile, lengths.mean), hardware.num_local, 1)
    return Plan(points, best, hardware, lengths, ttft_s, in_time, ratio)


def plan_record(plan: Plan) -> dict[str, Any]:
    """Returns the plan as JSON values; an infinite threshold is null."""
    best = plan.best
    threshold = best.threshold_tokens
    return {
        "threshold_tokens": None if math.isinf(threshold) else threshold,
        "num_remote": plan.hardware.num_remote,
        "num_prefill": best.num_prefill,
        "num_decode": best.num_decode,
        "rate": best.rate,
        "limit": best.limit.value,
        "ttft_s": plan.ttft_s,
        "ttft_rate": plan.ttft_rate,
        "share_remote": best.share_remote,
        "long_tokens": best.long_tokens,
        "short_tokens": best.short_tokens,
        "remote_rate": best.remote_rate,
        "local_rate": best.local_rate,
        "decode_rate": best.decode_rate,
        "egress_gbps": best.egress_bytes_per_s * 8 / 1e9,
        "mean_tokens": plan.lengths.mean,
        "ratio": plan.ratio and dataclasses.asdict(plan.ratio),
    }


def plan_text(plan: Plan) -> str:
    """Returns the plan as a table for people."""
    best = plan.best
    threshold = best.threshold_tokens
    shown = "never remote" if math.isinf(threshold) else f"{threshold:,.0f} tokens"
    num_remote = plan.hardware.num_remote
    link_gbps = plan.hardware.egress_bytes_per_s * 8 / 1e9
    rows = {
        "threshold t": shown,
        "remote prefill": f"{num_remote} instances, {best.remote_rate:.3f} requests/s",
        "local prefill": f"{best.num_prefill} instances, {best.local_rate:.3f} requests/s",
        "decode": f"{best.num_decode} instances, {best.decode_rate:.3f} requests/s",
        "Lambda_max": f"{best.rate:.3f} requests/s, limited by {best.limit.value}",
        "in time": f"up to {plan.ttft_rate:.3f} requests/s {IN_TIME:.0%} of first tokens come "
        f"within {plan.ttft_s:g} s",
        "remote share p": f"{best.share_remote:.3f}",
        "mean remote": f"{best.long_tokens:,.0f} tokens",
        "mean local": f"{best.short_tokens:,.0f} tokens",
        "mean of all": f"{plan.lengths.mean:,.0f} tokens",
        "egress": f"{best.egress_bytes_per_s * 8 / 1e9:.2f} of {link_gbps:.0f} Gbit/s",
    }
    if plan.ratio is not None:
        split = f"{plan.ratio.num_prefill} prefill, {plan.ratio.num_decode} decode"
        rows["P/D-Serve eq. 1"] = f"{split}, {plan.ratio.rate:.3f} requests/s, none remote"
    return "".join(f"{name:15} {value}\n" for name, value in rows.items())
