"""The planner: searches threshold and split, and says what it found.

Tests: tests/unit/sim/test_plan.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kvmesh.core.errors import ConfigError
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.prfaas import Hardware, OperatingPoint, ServingProfile, optimum, search


@dataclass(frozen=True, slots=True)
class Plan:
    """A finished search.

    Attributes:
        points: the whole grid, split by split.
        best: its optimum.
        lengths: of uncached prompt tokens.
    """

    points: list[OperatingPoint]
    best: OperatingPoint
    hardware: Hardware
    lengths: LengthDistribution


def make_plan(profile: ServingProfile, lengths: LengthDistribution, hardware: Hardware) -> Plan:
    """Searches the grid.

    Raises:
        ConfigError: no point serves any request.
    """
    points = search(profile, lengths, hardware)
    best = optimum(points)
    if best.rate <= 0:
        raise ConfigError("no split of these instances serves a request: too few of them")
    return Plan(points, best, hardware, lengths)


def plan_record(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values; an endless threshold is null."""
    best = plan.best
    threshold = best.threshold_tokens
    return {
        "threshold_tokens": None if math.isinf(threshold) else threshold,
        "num_remote": plan.hardware.num_remote,
        "num_prefill": best.num_prefill,
        "num_decode": best.num_decode,
        "rate": best.rate,
        "limit": best.limit.value,
        "share_remote": best.share_remote,
        "long_tokens": best.long_tokens,
        "short_tokens": best.short_tokens,
        "remote_rate": best.remote_rate,
        "local_rate": best.local_rate,
        "decode_rate": best.decode_rate,
        "egress_gbps": best.egress_bytes_per_s * 8 / 1e9,
        "mean_tokens": plan.lengths.mean,
    }


def plan_text(plan: Plan) -> str:
    """The plan as a table to read."""
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
        "remote share p": f"{best.share_remote:.3f}",
        "mean remote": f"{best.long_tokens:,.0f} tokens",
        "mean local": f"{best.short_tokens:,.0f} tokens",
        "mean of all": f"{plan.lengths.mean:,.0f} tokens",
        "egress": f"{best.egress_bytes_per_s * 8 / 1e9:.2f} of {link_gbps:.0f} Gbit/s",
    }
    return "".join(f"{name:15} {value}\n" for name, value in rows.items())


def plot_plan(plan: Plan, path: Path) -> None:
    """Draws the search: rate by split at each split's best threshold, and rate by threshold."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_split, by_threshold = figure.subplots(1, 2)
    splits = sorted({point.num_prefill for point in plan.points})
    bests = [optimum(p for p in plan.points if p.num_prefill == split) for split in splits]
    by_split.plot(splits, [point.rate for point in bests], marker="o")
    by_split.axvline(plan.best.num_prefill, linestyle=":", color="grey")
    by_split.set(xlabel="local prefill instances", ylabel="requests/s", title="best threshold")
    chosen = [
        point
        for point in plan.points
        if point.num_prefill == plan.best.num_prefill and 0 < point.threshold_tokens < math.inf
    ]
    thresholds = [point.threshold_tokens for point in chosen]
    remote = [_for_all(point.remote_rate, point.share_remote) for point in chosen]
    local = [_for_all(point.local_rate, 1 - point.share_remote) for point in chosen]
    by_threshold.plot(thresholds, [point.rate for point in chosen], linewidth=2.5, label="all")
    by_threshold.plot(thresholds, remote, linestyle="--", label="remote prefill")
    by_threshold.plot(thresholds, local, linestyle="--", label="local prefill")
    by_threshold.axhline(plan.best.decode_rate, linestyle=":", color="grey", label="decode")
    by_threshold.set(
        xlabel="threshold, tokens",
        xscale="log",
        ylim=(0, 2.5 * plan.best.rate),
        title=f"{plan.best.num_prefill} prefill, {plan.best.num_decode} decode",
    )
    by_threshold.legend()
    figure.savefig(path)


def _for_all(rate: float, share: float) -> float:
    return rate / share if share > 0 else math.nan
