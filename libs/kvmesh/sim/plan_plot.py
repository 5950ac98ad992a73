"""The plot of a search for a plan. Tests: tests/unit/sim/test_plan.py."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.figure import Figure

from kvmesh.policy.prfaas import optimum
from kvmesh.sim.plan import Plan


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
